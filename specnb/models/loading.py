"""Loading weights with transformers so that nothing is made up, and every failure is one line.

It knows checkpoints. It does not know what a model is for. Read `specnb.models.checks` next.
"""

from contextlib import contextmanager
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_weights(name_or_path, **options):
    """A transformers causal language model from safetensors, without remote code, all of whose weights were found.

    Raises
    ------
    IncompleteError
        Where the checkpoint and the architecture do not hold the same tensors. transformers would fill a missing one
        with random numbers and leave out one it does not know. An output head that shares the embedding is neither.
    """
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        name_or_path,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # They are named below.
        **options,
    )
    for what, keys in (
        ("lacks", info["missing_keys"]),
        ("has another shape of", {name for name, *_ in info["mismatched_keys"]}),
        ("holds what the model has no place for,", info["unexpected_keys"]),
    ):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise IncompleteError(
                f"the checkpoint {str(name_or_path)!r} does not fit a {type(model).__name__}: it {what} "
                f"{', '.join(sorted(keys)[:3])}{more}; take a complete checkpoint of this architecture"
            )
    return model


class IncompleteError(ValueError):
    """A checkpoint that does not hold exactly the tensors of its architecture."""


@contextmanager
def plain_errors(name_or_path):
    """While a model is loaded: no progress bars, and every failure as one ValueError that names the way out."""
    from safetensors import SafetensorError
    from torch import OutOfMemoryError

    try:
        with quiet():
            yield
    except (IncompleteError, OutOfMemoryError):
        raise
    except ImportError as error:
        raise ValueError(
            f"cannot load the model {str(name_or_path)!r}, for a package it needs is not installed: {first_line(error)}"
        ) from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"cannot load the model {str(name_or_path)!r}: it must be a local folder with config.json and safetensors "
            f"weights, or a model id on a hub that is reachable from here. {first_line(error)}"
        ) from error


def first_line(error):
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [""])[0]


@contextmanager
def quiet():
    """No loading bars and reports of transformers for a while: they would land in the output of notebooks."""
    from transformers.utils import logging

    was_on, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_on:
            logging.enable_progress_bar()


def has_tokenizer(name_or_path):
    """Whether a tokenizer should be looked for: in a folder only where one of its files lies there."""
    folder = Path(name_or_path)
    return not folder.is_dir() or any((folder / name).exists() for name in TOKENIZER_FILES)
