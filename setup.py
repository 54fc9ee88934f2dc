"""What pyproject.toml cannot say: prompts and draft in data/ travel in a wheel, as the folder specnb/shipped."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["specnb", "specnb.*"]), "specnb.shipped"],
    package_dir={"specnb.shipped": "data"},
    package_data={"specnb.shipped": ["prompts.jsonl", "smollm2-draft/*"]},
)
