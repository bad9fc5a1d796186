import json
import math
import os
import sys
import types
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandemrl.data.loading import load_rows
from tandemrl.data.rows import GSM8K_INSTRUCTION, DataError, Row, encode_prompts, messages_of


def verl(**changes):
    record = {
        "data_source": "math500",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "test", "index": 7},
    }
    return {key: value for key, value in (record | changes).items() if value is not ...}


def jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_verl_row_from_jsonl_and_parquet_is_the_same_row(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([verl()]), tmp_path / "a.parquet")
    asked = ({"role": "user", "content": "2+2?"},)
    expected = Row("math500/test/7", asked, "math500", "4", {"split": "test", "index": 7}, ability="math")
    assert load_rows([jsonl(tmp_path / "a.jsonl", verl())]) == [expected]
    assert load_rows([str(tmp_path / "a.parquet")]) == [expected]


def test_raw_gsm8k_row(tmp_path):
    raw = {"question": "How many?", "answer": "1,000+234 = <<1000+234=1234>>1,234\n#### 1,234"}
    (row,) = load_rows([jsonl(tmp_path / "train.jsonl", raw)])
    assert row.example_id == "openai/gsm8k/train/0"
    assert row.data_source == "openai/gsm8k"
    assert row.ground_truth == "1234"
    assert row.messages == ({"role": "user", "content": f"How many? {GSM8K_INSTRUCTION}"},)


@pytest.mark.parametrize(
    ("value", "text"),
    [("4", "4"), (4, "4"), (0.5, "0.5"), ({"b": 1, "a": "ü"}, '{"b": 1, "a": "ü"}'), (["2"], '["2"]'), (0, "0")],
)
def test_ground_truth_becomes_a_string(tmp_path, value, text):
    (row,) = load_rows([jsonl(tmp_path / "a.jsonl", verl(reward_model={"ground_truth": value}))])
    assert row.ground_truth == text


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (verl(prompt=...), "'prompt'"),
        (verl(prompt=""), "'prompt': expected a non-empty string"),
        (verl(prompt=[{"role": "user"}]), "'prompt[0].content'"),
        (verl(prompt=[{"role": "user", "content": "a"}, {"content": "b"}]), "'prompt[1].role'"),
        (verl(prompt=[{"role": "assistant", "tool_calls": [{"name": "add"}]}]), "'prompt[0].tool_calls[0]'"),
        (verl(data_source=""), "'data_source'"),
        (verl(reward_model=...), "'ground_truth': missing; write the correct answer there"),
        (verl(reward_model="4"), "'reward_model': no object: '4'; write the correct answer there"),
        (verl(reward_model={"ground_truth": ""}), "'reward_model.ground_truth'"),
        (verl(extra_info=[1]), "'extra_info'"),
        ({"question": "q"}, "'ground_truth': missing; write the correct answer there"),
        ({"question": "q", "answer": "#### "}, "'answer': no '#### N' in"),
        ({"text": "q", "label": "4"}, "'prompt': missing; set data.columns.prompt=COLUMN. The row has label, text"),
        (verl(ability=3), "'ability': expected a string"),
        ([1, 2], "expected an object"),
    ],
)
def test_bad_row_names_file_line_and_field(tmp_path, record, field):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([json.dumps(verl()), "", json.dumps(record)]) + "\n")
    with pytest.raises(DataError) as error:
        load_rows([str(path)])
    assert str(path) in str(error.value)
    assert "line 3" in str(error.value)  # the blank line counts
    assert field in str(error.value)


@pytest.mark.parametrize("reward", [{}, {"reward_model": {}}, {"reward_model": {"ground_truth": None}}])
def test_ungraded_rows_need_no_ground_truth(tmp_path, reward):
    record = {name: value for name, value in verl().items() if name != "reward_model"} | reward
    [row] = load_rows([jsonl(tmp_path / "rows.jsonl", record)], graded=False)
    assert (row.ground_truth, row.raw_ground_truth) == ("", None)
    assert row.messages == load_rows([jsonl(tmp_path / "one.jsonl", verl())])[0].messages


PARTS = [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
ASKED = ({"role": "user", "content": "2+2?"},)


@pytest.mark.parametrize(
    ("record", "extra"),
    [
        ({"prompt": "2+2?", "solution": "4", "level": 3}, {"level": 3}),  # TRL's
        ({"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}, {}),
        ({"prompt": PARTS, "ground_truth": "4", "solution": "2+2=4"}, {"solution": "2+2=4"}),
        (
            {"question": "2+2?", "answer": "4", "info": {"hint": "add"}, "task": "sums"},  # verifiers'
            {"question": "2+2?", "info": {"hint": "add"}, "task": "sums"},
        ),
        ({"problem": "2+2?", "answer": "4", "unit": None}, {"problem": "2+2?"}),
    ],
)
def test_rows_of_other_libraries_as_they_are(tmp_path, record, extra):
    [row] = load_rows([jsonl(tmp_path / "sums.jsonl", record)])
    assert row == Row("sums/1", ASKED, "sums", "4", extra)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "sums.parquet")
    assert load_rows([str(tmp_path / "sums.parquet")]) == [row]


COLUMNS = {"prompt": "ask", "ground_truth": "info.gold", "data_source": "task"}


@pytest.mark.parametrize("info", [{"gold": 4}, '{"gold": 4}'])
def test_columns_are_named_by_the_config(tmp_path, info):
    file = jsonl(tmp_path / "a.jsonl", {"ask": "2+2?", "task": "sums", "info": info, "prompt": "another"}, verl())
    own, verls = load_rows([file], columns=COLUMNS)
    assert own == Row("sums/1", ASKED, "sums", "4", {"ask": "2+2?", "info": info}, raw_ground_truth=4)
    assert [verls] == load_rows([jsonl(tmp_path / "b.jsonl", verl())])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "asked"}, r"a\.jsonl, line 1, field 'asked': missing, and data\.columns\.prompt names it"),
        ({"ground_truth": "info.gold"}, r"field 'info\.gold': missing, and data\.columns\.ground_truth names it"),
        ({"data_source": "level"}, "field 'level': expected a non-empty string, found 3"),
    ],
)
def test_a_column_that_is_not_there_is_refused(tmp_path, columns, message):
    with pytest.raises(DataError, match=message):
        load_rows([jsonl(tmp_path / "a.jsonl", {"prompt": "q", "answer": "4", "level": 3})], columns=columns)


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "c.parquet").write_text("not parquet")
    (tmp_path / "d.csv").write_text("a,b")
    (tmp_path / "e.jsonl").write_text("\n")
    for name, message in (
        ("c.parquet", "not readable as Parquet"),
        ("d.csv", r"expected a \.jsonl or \.parquet"),
        ("e.jsonl", "no rows; give a file"),
        ("gsm8k/train.parquet", "tandemrl data build gsm8k"),
        ("other.jsonl", "no such file"),
    ):
        with pytest.raises(DataError, match=message) as error:
            load_rows([str(tmp_path / name)])
        assert name in str(error.value)


DEEP_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, r"line 2: not JSON: nested too deeply to read"),
        (b'{"prompt": "a\\ud83d b"}', r"line 2: not JSON: a text has half of a character"),
        (b'{"prompt": "a", "prompt": "b"}', r"line 2: not JSON: the key 'prompt' stands twice"),
        (b'{"prompt": "\xff"}', r"line 2: not JSON: its bytes are not UTF-8"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", r"line 2: not JSON: Exceeds the limit"),
        (json.dumps(verl(reward_model={"ground_truth": math.nan})).encode(), r"line 2, field 'reward_model\.gr.*mis"),
        (json.dumps(verl(prompt=[DEEP_CALL])).encode(), r"line 2, field .*tool_calls\[0\]': expected .{1,400}$"),
    ],
)
def test_a_line_that_cannot_be_read_in_one_way_is_named(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(verl()).encode() + b"\n" + content + b"\n")
    with pytest.raises(DataError, match=message):
        load_rows([str(path)])


def test_a_byte_order_mark_and_whole_pairs_of_surrogates_are_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(verl(prompt="\U0001f600 \\ud83d")).encode() + b"\r\n")
    [row] = load_rows([str(path)])
    assert row.messages[0]["content"] == "\U0001f600 \\ud83d"


def test_a_folder_and_bytes_that_are_no_text_in_parquet_are_named(tmp_path):
    texts = pyarrow.array([b"a", b"\xff\xfe"])
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, texts.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"question": column, "answer": ["#### 1"] * 2}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: not readable as Parquet: 'utf-8' codec"):
        load_rows([str(tmp_path / "a.parquet")])
    with pytest.raises(DataError, match="a folder; name the files in it"):
        load_rows([str(tmp_path)])


def test_ids_are_unique_over_all_sources(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", verl(), verl(), verl(extra_info=...))
    b = jsonl(tmp_path / "b.jsonl", verl(), verl(data_source="aime24"))
    ids = [row.example_id for row in load_rows([a, b])]
    assert ids == ["math500/test/7", "math500/test/7#2", "math500/3", "math500/test/7#3", "aime24/test/7"]
    c = jsonl(tmp_path / "c.jsonl", *(verl(extra_info={"index": index}) for index in (1, 1, "1#2")))
    assert [row.example_id for row in load_rows([c])] == ["math500/1", "math500/1#3", "math500/1#2"]
    with pytest.raises(DataError, match="listed twice"):
        load_rows([a, a])
    (tmp_path / "link.jsonl").symlink_to(a)
    for name in (tmp_path / "link.jsonl", f"{tmp_path}/./a.jsonl", os.path.relpath(a)):
        with pytest.raises(DataError, match=f"listed twice: {a} and {name} are one file; list it once"):
            load_rows([a, str(name)])
    with pytest.raises(DataError, match=r"sources='a\.jsonl': expected a list, as \['a\.jsonl'\]"):
        load_rows("a.jsonl")


@pytest.mark.parametrize(
    "source", ["synthetic:plain", "synthetic:plain:train:x", "synthetic:plain:test", "hf:a:b", "hf:a::b"]
)
def test_malformed_source_is_refused(source):
    with pytest.raises(DataError, match=source.rpartition(":")[0]):
        load_rows([source])


def test_hub_source_uses_datasets(monkeypatch):
    calls = []

    def load_dataset(repo, config, *, split):
        calls.append((repo, config, split))
        if repo == "openai/gsm8k":
            return [{"question": "q", "answer": "#### 3"}]
        return [{"problem": "1/2?", "answer": r"\frac12"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    rows = load_rows(["hf:openai/gsm8k:main:test", "hf:HuggingFaceH4/MATH-500:default:test"])
    assert calls == [("openai/gsm8k", "main", "test"), ("HuggingFaceH4/MATH-500", "default", "test")]
    assert [row.ground_truth for row in rows] == ["3", r"\frac12"]
    assert [row.example_id for row in rows] == ["openai/gsm8k/test/0", "HuggingFaceH4/MATH-500/test/0"]


# ---- encode_prompts ------------------------------------------------------------------------------------------------


def tokenizer(template="{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}{{ 'assistant' }}"):
    words = ["<unk>", "user", "assistant", "system", ":", "one", "two", "box", "it"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", chat_template=template)


def row(*messages):
    return Row("r", tuple({"role": role, "content": content} for role, content in messages), "math500", "1", {})


def test_prompts_are_templated_and_overlong_ones_dropped():
    short, long = row(("user", "one")), row(("user", "one two one two"))
    prompts, dropped = encode_prompts([long, short, long], tokenizer(), max_prompt_tokens=4)
    assert dropped == 2
    assert [(prompt.row, prompt.tokens) for prompt in prompts] == [(short, (1, 4, 5, 2))]


def test_suffix_goes_to_the_last_user_message_only():
    turns = row(("user", "one"), ("assistant", "two"), ("user", "one"), ("system", "two"))
    ((_, tokens, _),), _ = encode_prompts([turns], tokenizer(), max_prompt_tokens=99, suffix="box it")
    assert tokens == (1, 4, 5, 2, 4, 6, 1, 4, 5, 7, 8, 3, 4, 6, 2)
    ((_, spaced, _),), _ = encode_prompts([turns], tokenizer(), max_prompt_tokens=99, suffix="\nbox it")
    assert spaced == tokens
    assert turns.messages[2]["content"] == "one"  # the row itself is untouched


def rendered(text):
    return Row("r", ({"role": "user", "content": text},), "countdown", "1", {"rendered": True})


def test_a_rendered_prompt_is_tokenised_as_it_is():
    [prompt], dropped = encode_prompts(
        [rendered("one two it"), rendered("one " * 9)], tokenizer(None), max_prompt_tokens=4
    )
    assert (prompt.tokens, dropped) == ((5, 6, 8), 1)


def test_rendered_prompts_that_cannot_be_used_are_named():
    with pytest.raises(DataError, match=r"row r: its prompt is rendered, but data\.prompt_suffix is not empty; build"):
        encode_prompts([rendered("one")], tokenizer(), max_prompt_tokens=9, suffix="box it")
    for messages in ((), ({"role": "assistant", "content": None},) * 3):
        with pytest.raises(DataError, match=f"rendered, but has {len(messages)} messages"):
            encode_prompts([replace(rendered("one"), messages=messages)], tokenizer(), max_prompt_tokens=9)
    with pytest.raises(DataError, match=r"rendered, but tokenizer .* has no <\|im_start\|>; build it with"):
        encode_prompts([rendered("<|im_start|>user one")], tokenizer(), max_prompt_tokens=9)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ raise_exception('no system role') }}", "TemplateError: no system role"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_chat_template_that_fails_is_named_with_the_row(template, reason):
    broken = tokenizer()
    broken.chat_template, broken.name_or_path = template, "models/own"
    with pytest.raises(DataError, match=rf"row .*: the chat template of tokenizer 'models/own' failed: {reason}"):
        encode_prompts([row(("user", "one"))], broken, max_prompt_tokens=9)


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "two"}}]
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }} {% for c in m.tool_calls or [] %}{{ c.function.arguments.a }} {% endfor %}"
    "{% endfor %}"
)


def test_messages_keep_their_tool_calls_and_what_the_tools_said():
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 1}
    said = {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add", "tool_calls": None}
    assert messages_of([asked, said], "here") == (
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
    )


def test_prompts_begin_as_the_environment_says_and_name_its_tools():
    def opening(row):
        return [{"role": "system", "content": row.ground_truth}, *row.messages]

    with_opening, _ = encode_prompts([row(("user", "one"))], tokenizer(), max_prompt_tokens=99, opening=opening)
    assert with_opening[0].tokens == (3, 4, 0, 1, 4, 5, 2)  # system : 1 user : one assistant
    told, dropped = encode_prompts(
        [row(("user", "one")), row(("user", "one"), ("user", "one"))],
        tokenizer(WITH_TOOLS.replace("{{ m.role }} ", "{{ m.role }} {{ m.content }} ")), max_prompt_tokens=3,
        tools=TOOLS,
    )  # fmt: skip
    assert ([prompt.tokens for prompt in told], dropped) == ([(6, 1, 5)], 1)
    with pytest.raises(DataError, match=r"row r: its prompt is rendered, but an environment .* cannot begin"):
        encode_prompts([rendered("one")], tokenizer(), max_prompt_tokens=9, opening=opening)
