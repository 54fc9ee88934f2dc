"""Prompt files as people write them, and what becomes of a prompt on its way to token ids."""

import json
import os
import subprocess
import sys
import time
import warnings

import pandas as pd
import pytest

from specnb.cli import main
from specnb.measure.json_lines import json_lines
from specnb.measure.prompts import Prompt, load_prompts
from tests.test_models import WORDS, tokenizer_of

HI = {"role": "user", "content": "Hi"}


def written(tmp_path, *entries):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in entries), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ('{"kind": "x"}', "line 2.*either 'messages' or 'prompt'"),
        ('{"prompt": "a", "messages": []}', "line 2"),
        ('{"prompt": "a", "max_new_tokens": 0}', "line 2.*at least 1"),
        ('{"prompt": "a", "id": "one"}', "line 2.*'one' is used more than once"),
        ('{"messages": [{"role": "user"}]}', "line 2.*content"),
    ],
)
def test_a_bad_prompt_file_names_the_line(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine", "id": "one"}\n' + line)
    with pytest.raises(ValueError, match=message):
        load_prompts(path)


@pytest.mark.parametrize(
    ("entry", "read"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, [HI]),
        ({"messages": [{"role": "user", "content": ["Hi", "there"]}]}, [{"role": "user", "content": "Hi\nthere"}]),
        ({"prompt": ["Hi"]}, "Hi"),
        ({"prompt": "Hi", "messages": None}, "Hi"),
        ({"turns": ["Hi"]}, [HI]),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, [HI]),
        ({"conversations": [{"from": "system", "value": "Be kind"}, {"from": "user", "value": "Hi"}]},
         [{"role": "system", "content": "Be kind"}, HI]),
        (
            {"conversations": [{"from": who, "value": "Hi"} for who in ("human", "gpt", "human")]},
            [HI, {"role": "assistant", "content": "Hi"}, HI],
        ),
    ],
)  # fmt: skip
def test_what_has_one_obvious_meaning_is_read(tmp_path, entry, read):
    (prompt,) = load_prompts(written(tmp_path, entry))
    assert read == (prompt.text if isinstance(read, str) else prompt.messages)
    assert (prompt.text is None) != (prompt.messages is None)


def test_the_names_of_mt_bench_are_taken_for_ours(tmp_path):
    (prompt,) = load_prompts(written(tmp_path, {"question_id": 81, "category": "writing", "turns": ["Hi"]}))
    assert (prompt.id, prompt.kind) == ("81", "writing")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [{}]}, HI]}, "message 2 calls a tool"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 has a 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "no text: image_url"),
        ({"messages": [{"role": "user", "content": [1]}]}, "parts that are no text"),
        ({"messages": [{"role": "user", "content": "  "}]}, "the last message holds no text"),
        ({"messages": [{"role": None, "content": "Hi"}]}, "needs a 'role'"),
        ({"messages": "Hi"}, "'messages' is a list"),
        ({"messages": []}, "'messages' is a list"),
        ({"messages": [HI, {"role": "assistant", "content": "Hello"}]}, "the last message is the assistant's"),
        ({"messages": [HI], "tools": [{}]}, "'tools' would change the prompt"),
        ({"messages": [HI], "prompt": "Hi"}, "'messages' and 'prompt'"),
        ({"prompt": ["Hi", "Ho"]}, "2 texts"),
        ({"prompt": [1, 2, 3]}, "token ids mean nothing without"),
        ({"prompt": [7]}, "token ids mean nothing without"),
        ({"prompt": [[1, 2]]}, "token ids mean nothing without"),
        ({"prompt": 5}, "got 5"),
        ({"prompt": ""}, "not empty"),
        ({"turns": ["Hi", "Ho"]}, "keep the first"),
        ({"turns": [None]}, "neither a text"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}, "the assistant's"),
        ({"conversations": ["Hi"]}, "list of turns"),
        ({"conversations": [{"value": "Hi"}]}, "needs a 'role'"),
        ({"prompt": "Hi", "max_new_tokens": 1e400}, "Infinity is no number"),
        ({"prompt": "Hi", "max_new_tokens": 10**400}, "finite number"),
        ({"prompt": "Hi", "max_new_tokens": 1.5}, "whole number"),
        ({"prompt": "Hi", "max_new_tokens": True}, "finite number"),
        ({"prompt": "Hi", "weight": float("nan")}, "NaN is no number"),
        ({"prompt": "Hi", "weight": float("inf")}, "Infinity is no number"),
        ({"prompt": "Hi", "weight": "heavy"}, "finite number"),
        ({"prompt": "Hi", "weight": -1}, "above 0"),
        ({"prompt": "Hi", "id": {}}, "'id' is a text"),
        ({"prompt": "half a smile \ud83d"}, "half of a surrogate pair"),
        (["Hi"], "JSON object, this is a list"),
        ("Hi", "JSON object, this is a str"),
    ],
)
def test_the_rest_is_refused_with_file_and_line(tmp_path, entry, message):
    with pytest.raises(ValueError, match=rf"p\.jsonl, line 2: .*{message}"):
        load_prompts(written(tmp_path, {"prompt": "fine"}, entry))


def test_a_weight_too_large_to_write_down_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "weight": 1e999}')
    with pytest.raises(ValueError, match="line 1: 'weight' is a finite number, got inf"):
        load_prompts(tmp_path / "p.jsonl")


def test_a_null_is_as_good_as_a_field_left_out(tmp_path):
    nulls = dict.fromkeys(("id", "kind", "max_new_tokens", "weight"))
    first, second = load_prompts(written(tmp_path, {"prompt": "a", **nulls}, {"prompt": "b", **nulls}))
    assert (first.id, second.id) == ("1", "2") and second == Prompt("2", "own", None, "b", 64, 1.0)


def test_with_a_limit_nothing_beyond_it_is_read(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n{ broken')
    assert [prompt.text for prompt in load_prompts(tmp_path / "p.jsonl", 2)] == ["a", "b"]


def test_the_time_to_find_a_repeated_id_grows_with_the_file_alone(tmp_path):
    path = written(tmp_path, *({"prompt": "a", "id": str(i)} for i in range(30_000)))
    began = time.perf_counter()
    assert len(load_prompts(path)) == 30_000
    assert time.perf_counter() - began < 6  # Comparing every id with every other takes ten times that.


LINES = '{"prompt": "caf\u00e9"}\n{"prompt": "b\u2028c\x85d"}\n'


@pytest.mark.parametrize(
    "stored",
    [
        LINES.encode("utf-8"),
        LINES.encode("utf-8-sig"),
        LINES.replace("\n", "\r\n").encode("utf-8"),
        LINES.replace("\n", "\r").encode("utf-8-sig"),
        LINES.rstrip().encode("utf-8"),
    ],
    ids=["plain", "byte-order mark", "Windows", "old Mac with a mark", "no end"],
)
def test_utf_8_is_read_with_any_line_end_and_a_separator_inside_a_text_ends_none(tmp_path, stored):
    (tmp_path / "p.jsonl").write_bytes(stored)
    assert [prompt.text for prompt in load_prompts(tmp_path / "p.jsonl")] == ["caf\u00e9", "b\u2028c\x85d"]
    assert [(number, place[-6:]) for place, number, _ in json_lines(tmp_path / "p.jsonl")] == [
        (1, "line 1"),
        (2, "line 2"),
    ]


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("utf-16", "line 1: this is UTF-16"),
        ("utf-16-le", "line 1: this is UTF-16"),
        ("utf-32", "line 1: this is UTF-16 or UTF-32"),
        ("latin-1", "line 2: byte 16 of the line, 0xe9, is not UTF-8"),
    ],
)
def test_another_encoding_is_named_with_file_and_line_in_prompts_and_in_ids_alike(tmp_path, encoding, message, capsys):
    path = tmp_path / "p.jsonl"
    path.write_bytes('{"prompt": "a"}\n{"prompt": "caf\u00e9"}\n'.encode(encoding))
    with pytest.raises(ValueError, match=rf"p\.jsonl, {message}.*save the file as UTF-8"):
        load_prompts(path)
    if encoding != "latin-1":
        assert main(["audit", "greedy", str(path), str(path)]) == 1
        assert message in capsys.readouterr().err


def test_an_ascii_locale_changes_nothing(tmp_path):
    path = written(tmp_path, {"prompt": "x"})
    path.write_text('{"prompt": "caf\u00e9"}', encoding="utf-8")
    code = f"from specnb.measure.prompts import load_prompts; print(ascii(load_prompts({str(path)!r})[0].text))"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == r"'caf\xe9'"


def test_the_project_s_prompts_are_balanced():
    prompts = load_prompts()
    assert len(prompts) >= 28 and len({p.kind for p in prompts}) == 7
    for length in range(7, len(prompts) + 1, 7):
        counts = pd.Series([p.kind for p in load_prompts(limit=length)]).value_counts()
        assert counts.nunique() == 1 and len(counts) == 7


# --- from a prompt to ids ---

SAYS = "{{ message['role'] }}: {{ message['content'] | trim }}\n"
LIKE_CHATML = "{% for message in messages %}" + SAYS + "{% endfor %}assistant:"
LIKE_GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must\n alternate') }}{% endif %}" + SAYS + "{% endfor %}assistant:"
)
DEAF = (
    "{% for message in messages %}{% if message['role'] in ('user', 'assistant') %}" + SAYS + "{% endif %}{% endfor %}"
)
SYSTEM = {"role": "system", "content": "Be brief"}


def bytes_tokenizer(template=None):
    """Every byte is a token, so that any text can be represented."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {sign: number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)


def encoded(tokenizer, *messages):
    return tokenizer.decode(Prompt("p1", "own", list(messages), None, 8, 1.0).encode(tokenizer))


def test_messages_become_what_the_template_makes_of_them():
    tokenizer = bytes_tokenizer(LIKE_CHATML)
    messages = [
        SYSTEM,
        HI,
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": " caf\u00e9 \U0001f600\n"},
    ]
    ids = Prompt("p1", "own", messages, None, 8, 1.0).encode(tokenizer)
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids).endswith("assistant: Hi\nuser: caf\u00e9 \U0001f600\nassistant:")


@pytest.mark.parametrize("template", [LIKE_GEMMA, DEAF], ids=["refuses", "drops"])
def test_a_system_message_without_a_place_begins_the_first_user_message_and_that_is_said(template):
    with pytest.warns(UserWarning, match="no place for system messages; they are put before") as said:
        assert "user: Be brief\n\nHi" in encoded(bytes_tokenizer(template), SYSTEM, HI)
    assert len(said) == 1 and said[0].filename == __file__


def test_prompts_without_a_system_message_are_rendered_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encoded(bytes_tokenizer(LIKE_GEMMA), HI).startswith("user: Hi")


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (LIKE_GEMMA, [HI, HI], "refuses it: Conversation roles must alternate"),
        (LIKE_GEMMA, [SYSTEM, HI, HI], "refuses it: System role not supported"),
        (DEAF, [HI, {"role": "tool", "content": "Hi"}, HI], "leaves out or changes the text of the tool message"),
        ("{{ messages[0]['content'] }}", [HI, HI], "leaves out or changes the text of the user message"),
        ("{{ messages[0]['content'] | upper }}", [HI], "leaves out or changes the text of the user message"),
        ("{{ nobody.knows }}", [HI], "refuses it: 'nobody' is undefined"),
    ],
)
def test_a_complaint_of_a_template_is_one_line_that_names_the_prompt(template, messages, message):
    with pytest.raises(ValueError, match=rf"^prompt 'p1': the chat template of the target {message}") as refused:
        encoded(bytes_tokenizer(template), *messages)
    assert "\n" not in str(refused.value)


def test_a_text_for_which_there_is_no_token_is_refused_by_name():
    tokenizer = tokenizer_of(WORDS)
    assert Prompt("p1", "own", None, "w1 w2 [unk]", 8, 1.0).encode(tokenizer) == [3, 4, 0]
    with pytest.raises(ValueError, match=r"^prompt 'p1': the tokenizer of the target has no token for 'stranger'"):
        Prompt("p1", "own", None, "w1 stranger w2", 8, 1.0).encode(tokenizer)


def test_a_text_that_a_tokenizer_drops_without_a_word_is_refused_by_name():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1, " ": 2}, [])))
    assert Prompt("p1", "own", None, "ab ba", 8, 1.0).encode(letters) == [0, 1, 2, 1, 0]
    with pytest.raises(ValueError, match="no token for 'cd'"):
        Prompt("p1", "own", None, "ab cd", 8, 1.0).encode(letters)
