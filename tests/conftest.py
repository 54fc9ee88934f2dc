"""Models for the tests: tiny random ones in float64, and SmolLM2 where it has been fetched."""

import threading

import pytest
import torch

from specnb.models import CausalLM

VOCAB = 61


def tiny_model(family, *, layers=2, seed=0, **options):
    """A random transformers model of a few thousand parameters in float64, where greedy ids are owed exactly."""
    import transformers

    torch.manual_seed(seed)
    common = {"vocab_size": VOCAB, "max_position_embeddings": 128, "num_hidden_layers": layers, **options}
    heads = {"num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    if family == "GPTNeoX":
        config = transformers.GPTNeoXConfig(**heads, **common)
    else:
        config = getattr(transformers, f"{family}Config")(num_key_value_heads=2, **heads, **common)
    return getattr(transformers, f"{family}ForCausalLM")(config).double()


class FakeClock:
    """A clock that stands still until it is moved, in seconds."""

    now = 0.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


@pytest.fixture
def tiny():
    """A function that builds a fresh `CausalLM`: family, then options of `tiny_model`."""
    return lambda family="Llama", **options: CausalLM(tiny_model(family, **options))


@pytest.fixture(scope="session")
def smollm2():
    from specnb.models import load_pair
    from specnb.models.places import model_folder

    try:
        model_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return load_pair(device="cpu")


@pytest.fixture
def serving():
    """A function that runs a local HTTP server beside the test and returns it; all are closed at the end."""
    running = []

    def start(server):
        running.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)
