"""Making a draft in miniature: a tiny random target writes text, a pruned copy learns from its probabilities."""

import importlib.util
import json
import types
from unittest import mock

import pytest
import torch

from specnb.drafters.pruned import PrunedLM
from specnb.measure.prompts import Prompt
from specnb.models import CausalLM
from specnb.models.places import PROJECT
from tests.conftest import tiny_model
from tests.test_models import WORDS, tokenizer_of
from tests.test_project import assert_same_picture


def script(name):
    spec = importlib.util.spec_from_file_location(name, PROJECT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def distill():
    return script("distill")


@pytest.fixture(scope="module")
def target():
    return CausalLM(tiny_model("Llama", initializer_range=0.3).float())


@pytest.fixture(scope="module")
def text(distill, target):
    shards = [distill.write_text(target.model, [1, 2], rows=8, length=12, seed=seed) for seed in range(4)]
    return shards[:3], shards[3:]


def test_written_text_is_the_target_s_and_the_seed_repeats_it(distill, target):
    one, two, other = (distill.write_text(target.model, [1, 2], rows=6, length=9, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one["ids"], two["ids"]) and not torch.equal(one["ids"], other["ids"])
    assert one["ids"].shape == (6, 11) and one["hidden"].shape == (6, 9, 32)
    # The kept states and normalisers give the probabilities of a plain forward over the finished text.
    for row in (0, 5):
        target.reset()
        logits = target.forward(one["ids"][row : row + 1].long(), num_logits=10).logits[0, :-1]
        kept = one["hidden"][row] @ target.model.lm_head.weight.T - one["log_total"][row][:, None]
        assert torch.allclose(kept, logits.log_softmax(-1), atol=1e-4)


def test_text_is_drawn_at_its_row_s_temperature(distill, target):
    """Cold rows choose likely tokens: mean log-probability of what was drawn falls with the row's temperature."""
    text = distill.write_text(target.model, [1, 2], rows=64, length=32, seed=0)
    log_probs = (text["hidden"] @ target.model.lm_head.weight.T).log_softmax(-1)
    drawn = log_probs.gather(-1, text["ids"][:, 2:].long()[..., None])[..., 0].mean(-1)
    assert drawn[:16].mean() > drawn[-16:].mean() + 0.1


def test_loss_and_overlap_by_hand(distill):
    target_probs = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.1, 0.8]])
    draft_probs = torch.tensor([[0.6, 0.4], [0.5, 0.5]])  # over the first two ids
    kept = target_probs[:, :2].log() + 2.0  # any normaliser
    loss, overlap = distill.soft_target_loss(draft_probs.log(), kept, torch.full((2,), 2.0), 1.0)
    assert overlap == pytest.approx((0.5 + 0.2 + 0.1 + 0.1) / 2)
    # At temperature 1/2, over the ids kept: (25, 4) / 29 against (36, 16) / 52, and (1, 1) / 2 twice.
    sharp = (36 / 52 + 4 / 29 + 1) / 2
    assert loss.item() == pytest.approx(1 - (2 * overlap.item() + sharp) / 3)
    divergence, _ = distill.soft_target_loss(draft_probs.log(), kept, torch.full((2,), 2.0), 0.0)
    by_hand = (target_probs[:, :2] * (target_probs[:, :2] / draft_probs).log()).sum(-1).mean()
    assert divergence.item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_the_most_frequent_ids_and_those_asked_for(distill):
    shard = {"ids": torch.tensor([[9, 9, 4, 4, 4, 2, 7]]), "hidden": torch.zeros(1, 5, 1)}
    ids, covered = distill.frequent_ids([shard], 2)
    assert ids.tolist() == [2, 4] or ids.tolist() == [4, 7]
    ids, covered = distill.frequent_ids([shard], 2, always=[7])
    assert ids.tolist() == [4, 7] and covered == 4 / 5  # the prefix is not counted


def trained(distill, target, text, folder, steps=12, bfloat16=False):
    draft = PrunedLM(target, [1], range(0, 61, 2))
    options = {"rows": 4, "peak": 3e-3, "log_every": 2, "evaluate_every": 4, "bfloat16": bfloat16}
    distill.train(draft, text, folder, tokens=steps * 4 * 12, **options)
    return draft


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_muon_steps_only_where_the_device_is_fast_in_bfloat16(distill, target, text, tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(distill, "default_dtype", lambda device: dtype)
    monkeypatch.setattr(distill, "optimizers_of", seen := mock.Mock(wraps=distill.optimizers_of))
    trained(distill, target, text, tmp_path, steps=1, bfloat16=None)
    parameters, _, bfloat16 = seen.call_args.args
    optimizers = distill.optimizers_of(parameters, 1e-3, bfloat16)
    assert any(isinstance(optimizer, torch.optim.Muon) for optimizer in optimizers) == (dtype is torch.bfloat16)
    stepped = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(stepped) == sorted(map(id, parameters))  # each once


@pytest.mark.parametrize("bfloat16", [True, False])
def test_training_lowers_the_loss_and_raises_the_held_out_overlap(distill, target, text, tmp_path, capsys, bfloat16):
    trained(distill, target, text, tmp_path, steps=120, bfloat16=bfloat16)
    assert capsys.readouterr().out == ""  # in a notebook a bar floods nbval, unless it is asked for
    log = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    held_out = [line["held_out_overlap"] for line in log if "held_out_overlap" in line]
    assert held_out[-1] > held_out[0] + 0.02
    divergence = [line["loss"] for line in log if line["step"] < 30]  # before total variation is mixed in
    assert divergence[-1] < divergence[0]
    assert [line["step"] for line in log] == list(range(2, 121, 2))


@pytest.mark.parametrize("bfloat16", [True, False])
def test_a_killed_training_resumes_to_the_same_weights(distill, target, text, tmp_path, monkeypatch, bfloat16):
    whole = trained(distill, target, text, tmp_path / "whole", bfloat16=bfloat16)
    calls, step_on = [], distill.step_on

    def killed(*arguments, **options):
        calls.append(1)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return step_on(*arguments, **options)

    monkeypatch.setattr(distill, "step_on", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(distill, target, text, tmp_path / "killed", bfloat16=bfloat16)
    monkeypatch.undo()
    again = trained(distill, target, text, tmp_path / "killed", bfloat16=bfloat16)  # from the checkpoint at step 8
    for name, tensor in whole.own_state().items():
        assert torch.equal(tensor, again.own_state()[name]), name
    strip = lambda line: {k: v for k, v in json.loads(line).items() if k != "seconds"}  # noqa: E731
    one, two = ((tmp_path / name / "training.jsonl").read_text().splitlines() for name in ("whole", "killed"))
    assert [strip(line) for line in one] == [strip(line) for line in two]


def test_training_changes_nothing_of_the_target(distill, target, text, tmp_path):
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    trained(distill, target, text, tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.model.state_dict().items())


def test_a_folder_holds_one_run_only(distill, target, text, tmp_path, monkeypatch):
    trained(distill, target, text, tmp_path)
    with pytest.raises(ValueError, match=r"another settings \(tokens 576, now 624\).*another --work"):
        trained(distill, target, text, tmp_path, steps=13)
    (tmp_path / "training.partial").unlink()
    with pytest.raises(ValueError, match="checkpoint.safetensors is of an unknown run; give another --work"):
        trained(distill, target, text, tmp_path)
    monkeypatch.setattr(distill, "synthesise_shards", None)  # It is refused before a worker starts.
    with distill.kept(tmp_path / "text", "text", "text-*", target="target", rows=96, length=256, seed=0):
        pass
    with pytest.raises(ValueError, match=r"another settings \(seed 0, now 1\)"):
        distill.synthesise("target", tmp_path, tokens=1, seed=1)


def test_text_and_training_go_on_only_on_such_a_machine(distill, target, text, tmp_path):
    trained(distill, target, text, tmp_path)
    with distill.kept(tmp_path / "text", "text", "text-*", target="target", rows=96, length=256, seed=0):
        pass
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        for go_on in (
            lambda: trained(distill, target, text, tmp_path),
            lambda: distill.synthesise("target", tmp_path, tokens=1),
        ):
            with pytest.raises(ValueError, match=rf"another num_threads \({threads}, now {threads + 1}\)"):
                go_on()
    finally:
        torch.set_num_threads(threads)


def test_a_killed_synthesis_goes_on_with_the_shards_that_are_missing(distill, target, tmp_path, monkeypatch):
    written, write = [], distill.write_text

    def until_killed(*arguments, seed, **options):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(seed)
        return write(*arguments, seed=seed, **options)

    monkeypatch.setattr(distill.CausalLM, "from_pretrained", lambda *_, **__: target)
    monkeypatch.setattr(distill, "open_turn", lambda tokenizer, opening: [1, 2])
    monkeypatch.setattr(distill.torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(distill, "write_text", until_killed)
    with pytest.raises(KeyboardInterrupt):
        distill.synthesise_shards("target", tmp_path, range(4), 4, 6, 0, None)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["text-00000.safetensors", "text-00001.safetensors"]
    written.append("killed")
    distill.synthesise_shards("target", tmp_path, range(4), 4, 6, 0, None)
    assert written == [0, 1, "killed", 2, 3] and len(list(tmp_path.iterdir())) == 4
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())


def test_an_interrupted_evaluation_is_kept_unless_the_draft_is_another(distill, target, text, tmp_path, monkeypatch):
    monkeypatch.setattr(distill, "load_text", lambda folder: text)
    monkeypatch.setattr(distill, "train", lambda *_, **__: None)
    monkeypatch.setattr(distill, "write_sample", lambda *_: None)
    (tmp_path / "training.jsonl").write_text("")
    options = types.SimpleNamespace(vocabulary=20, train_tokens=0, seed=0)
    partial = tmp_path / "out" / "evaluation.json.partial"
    make = lambda layers: distill.build_and_train(target, layers, tmp_path / "out", tmp_path, options)  # noqa: E731
    make([0])
    partial.write_text("begun")
    make([0])
    assert partial.exists()
    make([1])
    assert not partial.exists()


# --------------------------------------------------------------------------------------- other targets


SCALED = {
    "Llama": {},
    "Granite": {"logits_scaling": 8.0},
    "Cohere": {"logit_scale": 4.0},
    "Gemma2": {
        "final_logit_softcapping": 1.5, "attn_logit_softcapping": None, "layer_types": ["full_attention"] * 2,
        "head_dim": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_soft_targets_are_the_target_s_own_probabilities(distill, name):
    """Also where its forward scales or caps what the head gives."""
    target = CausalLM(tiny_model(name, initializer_range=0.3, **SCALED[name]).float())
    text = distill.write_text(target.model, [1, 2], rows=4, length=9, seed=0)
    target.reset(4)
    usual = target.forward(text["ids"][:, :-1].long(), num_logits=9).logits.log_softmax(-1)
    draft = PrunedLM(target, [0, 1], range(0, 61, 2))  # every layer, and every other id
    theirs = distill.own_logits(draft.model, text["hidden"]) - text["log_total"][..., None]
    assert torch.allclose(theirs, usual[..., ::2], atol=1e-4)
    # What the draft learns from is what the whole target would give: p over its ids against p renormalised over them.
    by_hand = torch.minimum(theirs.exp(), theirs.softmax(-1)).sum(-1)
    assert distill.held_out_overlap(draft.model, [text], every=1) == pytest.approx(by_hand.mean().item(), abs=1e-4)


def test_padded_rows_of_the_embedding_are_never_written(distill):
    target = CausalLM(tiny_model("Llama").float())
    text = distill.write_text(target.model, [1, 2], rows=8, length=40, seed=0, vocab_size=50)
    assert text["ids"].max() < 50
    assert distill.write_text(target.model, [1, 2], rows=8, length=40, seed=0)["ids"].max() >= 50


def test_an_end_id_above_every_id_written_may_still_be_proposed(distill):
    shard = {"ids": torch.tensor([[9, 9, 4, 4, 4]]), "hidden": torch.zeros(1, 5, 1)}
    ids, covered = distill.frequent_ids([shard], 2, always=[60])
    assert ids.tolist() == [4, 60] and covered == 3 / 5


PLAIN = "{% for m in messages %} w0 {{ m.content }} w1 {% endfor %}"
REFUSED = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


@pytest.fixture
def short(distill, monkeypatch):
    """The evaluation's prompts and the openings, in words that the tiny tokenizer knows."""
    monkeypatch.setattr(distill, "OPENINGS", ("w2", "w3 w4"))
    messages = [{"role": "system", "content": "w5"}, {"role": "user", "content": "w6 w7"}]
    monkeypatch.setattr(distill, "load_prompts", lambda: [Prompt("p", "k", messages, None, 8, 1.0)])


def chatting(template=PLAIN, **options):
    tokenizer = tokenizer_of(WORDS)
    tokenizer.chat_template = template
    made = {"max_position_embeddings": 512, "eos_token_id": 3, **options}
    return CausalLM(tiny_model("Llama", **made).float(), tokenizer, name="chatting")


def test_a_target_that_every_step_can_work_with_passes_the_check(distill, short):
    distill.check(chatting(), [0, 1])


def test_a_template_without_system_messages_is_served(distill, short):
    with pytest.warns(UserWarning, match="no place for system messages"):
        distill.check(chatting(REFUSED + PLAIN), [0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: chatting(max_position_embeddings=128), "reads 128 tokens, and a row of its text has 259"),
        (lambda: chatting("w0"), "leaves out or changes what the user says"),
        (lambda: chatting("{{ raise_exception('only poems') }}"), "only poems"),
        (lambda: chatting(eos_token_id=10**6), "output ids must be some of"),
        (lambda: without("norm"), "has no norm"),
        (lambda: without("layers"), "has no layers"),
        (lambda: CausalLM(tiny_model("Llama").float(), name="mute"), "mute has no tokenizer"),
    ],
)
def test_what_a_later_step_would_fail_on_is_refused_before_the_first(distill, short, change, message):
    target = change()
    with pytest.raises(ValueError, match=message):
        distill.check(target, [0])


def without(part):
    target = chatting()
    delattr(target.model.base_model, part)
    return target


def test_layers_are_counted_from_either_end_and_others_are_refused(distill, short):
    target = chatting()
    assert distill.layers_of(target, "0,1,-1") == [0, 1, 1]
    for listed in ("2", "-3"):
        with pytest.raises(ValueError, match=r"kept layers must be some of 0\.\.1"):
            distill.check(target, distill.layers_of(target, listed))


def test_a_target_is_checked_before_anything_is_written(distill, short, monkeypatch, tmp_path, capsys):
    target = chatting(max_position_embeddings=128)
    monkeypatch.setattr(distill.CausalLM, "from_pretrained", lambda path: target)
    monkeypatch.setattr(distill, "synthesise", None)
    monkeypatch.setattr(distill.sys, "argv", ["distill.py", "--target", "x", "--work", str(tmp_path / "work")])
    with pytest.raises(SystemExit):
        distill.main()
    assert "take a target with a longer context" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_command_is_kept_without_the_folders_of_this_machine(distill, monkeypatch):
    typed = ["distill.py", "train", "--work", "/home/me/work", "--seed", "3", "--out=/home/me/draft"]
    monkeypatch.setattr(distill.sys, "argv", typed)
    assert distill.command() == "python scripts/distill.py train --seed 3"


def test_too_little_text_is_refused(distill, tmp_path):
    with pytest.raises(ValueError, match="synthesise first"):
        distill.load_text(tmp_path)


def test_the_card_says_what_config_log_and_evaluation_say():
    """The shipped card is written again from its files and must be the same: no number in it was typed."""
    folder = PROJECT / "data" / "smollm2-draft"
    assert script("draft_card").text(folder) == (folder / "README.md").read_text(encoding="utf-8")


def test_the_curve_of_the_training_is_current(tmp_path):
    again = tmp_path / "again.png"
    script("draft_card").figure(PROJECT / "data" / "smollm2-draft").savefig(again, dpi=110)
    assert_same_picture(PROJECT / "figures" / "smollm2-draft-training.png", again)
