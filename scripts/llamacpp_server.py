"""llama.cpp's server in this process, on loopback, until standard input closes. Runs in an environment of its own.

    .venv-llamacpp/bin/python scripts/llamacpp_server.py MODEL.gguf MODE

MODE: plain; matching (the default rule: a draft is kept where the target's own draw equals it); probabilistic (the rule
of Leviathan et al.). The draft is the target itself. The address is printed first.
"""

import sys

import xllamacpp

GGUF, MODE = sys.argv[1:3]
SLOTS, CONTEXT, DRAFTS = 4, 1024, 4

parameters = xllamacpp.CommonParams()
parameters.model.path = GGUF
parameters.n_ctx, parameters.n_parallel = SLOTS * CONTEXT, SLOTS
parameters.port, parameters.endpoint_metrics, parameters.warmup = 0, True, True
parameters.cpuparams.n_threads = 1
if MODE != "plain":
    parameters.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    draft = parameters.speculative.draft
    draft.mparams.path, draft.n_max, draft.n_min = GGUF, DRAFTS, 1
    draft.probabilistic = MODE == "probabilistic"
    draft.cpuparams.n_threads = 1
server = xllamacpp.Server(parameters)
print(server.listening_address, flush=True)
sys.stdin.read()
