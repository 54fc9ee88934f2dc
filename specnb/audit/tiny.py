"""A tiny random pair of models, and the exact law of a few tokens.

It knows transformers' models. It does not know tests. Read `specnb.audit.settings` next.
"""

from specnb.audit.settings import SAMPLING

MAX_CELLS = 100_000


def tiny_pair(vocab=32, *, gamma=3, seed=7, eos_id=None, family="Llama", **options):
    """A random target of two layers in float64 and a draft made of its first: `(target, assistant)`.

    They agree to about two thirds, and no token of a small vocabulary is rare. Both generation configs say top_k=0.
    """
    import torch
    import transformers

    def build(layers):
        config = getattr(transformers, f"{family}Config")(
            vocab_size=vocab, num_hidden_layers=layers, hidden_size=32, intermediate_size=32, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
            bos_token_id=None, eos_token_id=eos_id, pad_token_id=None, **options,
        )  # fmt: skip
        model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
        told = {**SAMPLING, "num_assistant_tokens": gamma, "assistant_confidence_threshold": 0.0}
        model.generation_config.update(**told, num_assistant_tokens_schedule="constant")
        return model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target, assistant = build(2), build(1)
    assistant.load_state_dict(target.state_dict(), strict=False)
    return target, assistant


def joint_law(target, prompt_ids, length, sampling):
    """Exact law of the next `length` tokens, `(vocab ** length,)`, from the target's logits; ids are base-vocab digits.

    After an end-of-sequence id the rest repeats it, so that shorter texts have a cell too.
    """
    import torch

    vocab, ends = target.config.vocab_size, torch.tensor(eos_ids_of(target), dtype=torch.long)
    if vocab**length > MAX_CELLS:
        raise ValueError(f"{length} tokens of {vocab} have {vocab**length} outcomes, more than {MAX_CELLS}; take fewer")
    prefixes, law = torch.tensor([list(prompt_ids)]), torch.ones(1, dtype=torch.float64)
    with torch.inference_mode():
        for position in range(length):
            rows = sampling.probs(target(prefixes).logits[:, -1].double())  # (vocab ** position, vocab)
            if position:
                ended = torch.isin(prefixes[:, -1], ends)
                rows[ended] = torch.nn.functional.one_hot(prefixes[ended, -1], vocab).double()
            law = (law[:, None] * rows).flatten()
            each = torch.arange(vocab).repeat(len(prefixes))[:, None]
            prefixes = torch.cat([prefixes.repeat_interleave(vocab, 0), each], 1)
    return law.numpy()


def eos_ids_of(target):
    ids = target.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else ids
