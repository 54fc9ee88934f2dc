"""Running servers, asked over HTTP: are they lossless, and what do they bear?"""
