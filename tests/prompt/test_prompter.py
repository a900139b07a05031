"""Prompts: where answers are read, what the model is shown, and that no client text becomes a control token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.decision import DecisionConfig

from onepass.errors import BadRequest, InvalidRequest, StartupError, TooManyTokens
from onepass.prompt.prompter import Prompter
from onepass.prompt.template import DecisionFormat
from onepass.prompt.tokens import MARK, SPLIT, ControlTokens, Memo
from onepass.wire.request import Request
from onepass.wire.schema import parse_request
from tests.support.checkpoints import CHAT_TEMPLATE, CONTROL_TOKENS, PLAIN_ADDED_TOKENS, STARTER, make_tokenizer

TOKENIZER = make_tokenizer()
STARTER_TOKENIZER = AutoTokenizer.from_pretrained(STARTER)
NAMES = (*CONTROL_TOKENS, *PLAIN_ADDED_TOKENS, MARK, SPLIT)
hostile = st.lists(
    st.sampled_from([*NAMES, "<", ">", "|", "<|", "|>", "im_end", "think", "a", " ", "\n", "é"]), max_size=6
).map("".join)


def decision(templates: dict[str, str] | None = None, **changes: Any) -> DecisionFormat:
    values: dict[str, Any] = {
        "templates": templates or {},
        "default_encoding": next(iter(templates or {}), "per_question"),
        "readout": "labels",
        "labels": {},
        "temperature": {},
        "noul_options": ("true", "false"),
        **changes,
    }
    return DecisionFormat(**values)


def chat_prompter(max_tokens: int = 1000, num_pairs: int = 676) -> Prompter:
    tokenizer = make_tokenizer(num_pairs) if num_pairs != 676 else TOKENIZER
    tokenizer.chat_template = CHAT_TEMPLATE
    return Prompter(tokenizer, decision(), max_tokens=max_tokens)


def starter_prompter(max_tokens: int = 4096, encoding: str = "auto") -> Prompter:
    return Prompter(STARTER_TOKENIZER, DecisionFormat.load(STARTER), max_tokens=max_tokens, encoding=encoding)


CHAT = chat_prompter()
POINTER = starter_prompter()


def request(state: Any, encoding: str | None = None, **questions: Any) -> Request:
    return parse_request(json.dumps({"state": state, "questions": questions, "encoding": encoding}).encode())


CHOICE = {"type": "choice", "instructions": "Which?", "criteria": {"red": "A colour", "two": None}}
NOUL = {"type": "noul", "instructions": "Is it?"}
SCORE = {"type": "score", "criteria": ["low", {"b": 1}, "high"]}


def test_a_chat_model_gets_the_librarys_default_prompt() -> None:
    (row,) = CHAT.render(request({"a": "ü", "b": [1]}, q=CHOICE))
    assert TOKENIZER.decode(row.input_ids) == (
        '<|im_start|>user\n{"a": "ü", "b": [1]}\n\nWhich?\nA. red: A colour\nB. two\n'
        "Answer with the letter of the option that fits best (A to B) only.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    (read,) = row.reads
    assert read.positions == (row.num_tokens - 1,)
    assert [TOKENIZER.decode([id_]) for id_ in read.label_ids] == ["A", "B"]


def test_the_starters_prompt_is_compact_json_with_a_place_for_each_option() -> None:
    per_question = POINTER.render(request({"b": "ü", "a": [1, None]}, c=CHOICE, s=SCORE))
    assert STARTER_TOKENIZER.decode(per_question[0].input_ids) == (
        '<|state|>{"b":"ü","a":[1,null]}<|end_state|><|question|>Which?<|choice|>'
        "<|option|>red<|description|>A colour<|end_option|><|option|>two<|end_option|><|answer|>"
    )
    (joint,) = POINTER.render(request({"b": "ü", "a": [1, None]}, "joint", c=CHOICE, s=SCORE))
    tokens = STARTER_TOKENIZER.convert_ids_to_tokens(joint.input_ids)
    assert [[tokens[place] for place in read.positions] for read in joint.reads] == [
        ["<|end_option|>"] * 2 + ["<|answer|>"],
        ["<|end_option|>"] * 3 + ["<|answer|>"],
    ]
    assert joint.num_tokens < sum(row.num_tokens for row in per_question)


@pytest.mark.parametrize("prompter", [CHAT, POINTER])
def test_ids_order_and_other_questions_never_reach_the_prompt(prompter: Prompter) -> None:
    alone = {
        name: prompter.render(request("x", q=question))[0]
        for name, question in (("c", CHOICE), ("n", NOUL), ("s", SCORE))
    }
    rows = prompter.render(request("x", **{"Is it urgent?": SCORE, "z": NOUL, "": CHOICE}))
    assert rows == [alone["s"], alone["n"], alone["c"]]


@given(st.text(max_size=60) | hostile, st.text(max_size=10))
def test_rows_of_one_request_are_those_of_requests_of_their_own(state: str, instructions: str) -> None:
    """What they share is tokenised once, wherever words and normalised characters end."""
    questions = {
        "n": {"type": "noul", "instructions": instructions or "?"},
        "c": {"type": "choice", "instructions": instructions, "criteria": {"a": None}},
        "d": {"type": "choice", "criteria": {"\u0301": None, "b": instructions}},
    }
    for prompter in (CHAT, POINTER):
        together = prompter.render(request(state, **questions))
        assert together == [prompter.render(request(state, q=question))[0] for question in questions.values()]


@pytest.mark.parametrize("prompter", [CHAT, POINTER])
@pytest.mark.parametrize("state", ["", "Hello.", "a <b>\n", {"a": [1, "<|mark|>"]}, "é é " * 25, "\n\n", "word " * 50])
def test_rows_know_how_far_the_prompts_of_all_questions_agree(prompter: Prompter, state: Any) -> None:
    """That much is computed once: at least all of the state but its last word, at most what truly agrees."""
    rows = prompter.render(request(state, n=NOUL, c=CHOICE, s=SCORE, o={"type": "noul", "instructions": "Ist es?"}))
    (shared,) = {row.num_shared for row in rows}
    assert len({tuple(row.input_ids[:shared]) for row in rows}) == 1
    assert all(shared <= read.positions[0] for row in rows for read in row.reads)
    agreed = next(n for n, ids in enumerate(zip(*(row.input_ids for row in rows), strict=False)) if len(set(ids)) > 1)
    assert agreed - 12 <= shared <= agreed
    alone = prompter.render(request(state, q=CHOICE))[0]
    assert alone.num_shared == shared


@pytest.mark.parametrize("tokenizer", [TOKENIZER, STARTER_TOKENIZER])
@given(text=st.text() | hostile)
def test_client_text_never_becomes_a_control_token(tokenizer: Any, text: str) -> None:
    tokens = ControlTokens(tokenizer)
    control = {id_ for id_, token in tokenizer.added_tokens_decoder.items()}
    name = CONTROL_TOKENS[1] if tokenizer is TOKENIZER else "<|state|>"
    rendered = f"{name}{tokens.fence(text)}{MARK}{tokens.fence(text)}{SPLIT}{tokens.fence(text)}"
    ids, marks, _, _ = tokens.encode(rendered, Memo())
    assert [id_ for id_ in ids if id_ in control] == [tokenizer.convert_tokens_to_ids(name)]
    assert len(marks) == 1
    if tokenizer is STARTER_TOKENIZER:  # it has no normaliser, so not a byte is lost
        assert tokenizer.decode(ids[1:]) == text * 3


@given(before=hostile, state=hostile, key=hostile, label=hostile, description=hostile)
def test_no_place_of_a_request_can_hold_a_control_token(
    before: str, state: str, key: str, label: str, description: str
) -> None:
    question = {"type": "choice", "instructions": before, "criteria": {label: description, "other": None}}
    bland = {"type": "choice", "instructions": "x", "criteria": {"x": "x", "other": None}}
    for prompter, tokenizer in ((CHAT, TOKENIZER), (POINTER, STARTER_TOKENIZER)):
        for encoding in prompter.encodings:
            (row,) = prompter.render(request({key: [state]}, encoding, q=question))
            (expected,) = prompter.render(request({"x": ["x"]}, encoding, q=bland))
            control = set(tokenizer.added_tokens_decoder)
            assert [i for i in row.input_ids if i in control] == [i for i in expected.input_ids if i in control]


@given(st.text(max_size=40), st.text(max_size=20))
def test_ordinary_text_gets_the_librarys_own_ids(state: str, label: str) -> None:
    """The library tokenises the whole prompt at once; ours takes the control tokens out first."""
    body = {"state": state, "questions": {"q": {"type": "choice", "criteria": {label: None, "other": None}}}}
    config = DecisionConfig()
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    for prompter, reference in ((CHAT, TOKENIZER), (POINTER, tokenizer)):
        if prompter is POINTER:
            config.chat_template = prompter.decision.templates["per_question"]
        ((inputs, _),) = config.prepare_inputs(body, reference)
        (row,) = prompter.render(request(state, q=body["questions"]["q"]))  # type: ignore[index]
        assert row.input_ids.tolist() == inputs["input_ids"][0].tolist()


def test_text_whose_closing_fence_a_template_cut_off_is_still_a_clients() -> None:
    tokens = ControlTokens(STARTER_TOKENIZER)
    rendered = f"<|state|>{tokens.fence('a <|answer|> b')}"
    for cut in range(len("<|state|>") + 1, len(rendered) + 1):
        ids = tokens.encode(rendered[:cut], Memo())[0]
        assert [id_ for id_ in ids if id_ in STARTER_TOKENIZER.added_tokens_decoder] == [ids[0]]


def test_many_control_tokens_in_many_texts_are_read_in_one_walk() -> None:
    """Each against each would be four hundred million comparisons."""
    state = ["<|mark|>"] * 20_000
    with pytest.raises(TooManyTokens):
        POINTER.render(request(state, q=NOUL))


def test_a_fixed_prompt_has_its_stored_ids() -> None:
    """The exact input of one decision: a change here changes every answer."""
    (row,) = POINTER.render(request("a<|answer|>", q={"type": "noul", "instructions": "b"}))
    names = STARTER_TOKENIZER.convert_ids_to_tokens(row.input_ids)
    assert names == [
        *("<|state|>", "a", "<", "|", "answer", "|", ">", "<|end_state|>", "<|question|>", "b", "<|noul|>"),
        *("<|option|>", "yes", "<|end_option|>", "<|option|>", "no", "<|end_option|>", "<|answer|>"),
    ]
    assert row.reads[0].positions == (13, 16, 17)


def test_a_prompt_at_the_limit_is_whole_and_one_over_it_is_refused_with_the_counts() -> None:
    text = "a b c " * 50
    (row,) = starter_prompter().render(request(text, q=NOUL))
    assert starter_prompter(max_tokens=row.num_tokens).render(request(text, q=NOUL)) == [row]
    with pytest.raises(TooManyTokens, match=rf"has {row.num_tokens} tokens; the limit is {row.num_tokens - 1}$"):
        starter_prompter(max_tokens=row.num_tokens - 1).render(request(text, q=NOUL))
    for text in ("word " * 200_000, "x" * 1_000_000, " " * 1_000_000, "é" * 300_000):
        with pytest.raises(TooManyTokens, match=r"has (over )?\d+ tokens; the limit is 1000$"):
            CHAT.render(request(text, q=NOUL))


def test_the_question_whose_prompt_is_too_long_is_named() -> None:
    long = {"type": "noul", "instructions": "word " * 3000}
    for questions, named in (({"short": NOUL, "i" * 60: long}, f"question '{'i' * 40}…': "), ({"i": long}, "")):
        with pytest.raises(TooManyTokens, match=rf"^{named}the prompt has \d+ tokens; the limit is 1000$"):
            starter_prompter(max_tokens=1000).render(request("a", **questions))


def test_a_limit_too_low_for_any_prompt_is_refused_at_the_start() -> None:
    with pytest.raises(StartupError, match="the limit is 5"):
        starter_prompter(max_tokens=5)


def test_options_run_to_255_over_two_letter_labels() -> None:
    options: dict[str, Any] = {f"option {n}": None for n in range(255)}
    (row,) = chat_prompter(max_tokens=10**6).render(request("x", q={"type": "choice", "criteria": options}))
    assert len(set(row.reads[0].label_ids)) == 255
    text = TOKENIZER.decode(row.input_ids)
    assert "\nZ. option 25\nAA. option 26\n" in text
    assert "Answer with the label of the option that fits best (A to IU) only." in text


def test_a_vocabulary_with_fewer_labels_says_how_many() -> None:
    prompter = chat_prompter(num_pairs=4)
    options: dict[str, Any] = {f"option {n}": None for n in range(40)}
    with pytest.raises(InvalidRequest) as caught:
        prompter.render(request("x", q={"type": "choice", "criteria": options}))
    loc, message, _ = caught.value.errors[0]
    assert loc == ("questions", "q", "choice", "criteria")
    assert message == "must have at most 30 options for this model, not 40"


def test_an_encoding_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="encoding: must be 'per_question' for this model"):
        CHAT.render(request("x", "joint", q=NOUL))
    with pytest.raises(StartupError, match="this checkpoint does per_question only"):
        Prompter(TOKENIZER, decision(), max_tokens=100, encoding="joint")
    assert starter_prompter(encoding="joint").encoding == "joint"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ state }}{{ question.labels[0] }}<|mark|><|mark|>", "prompt can be made"),
        ("{{ state|first }}", "rewrites client text"),
        ("{{ '<|' ~ state ~ '|>' }}", "builds control tokens around it"),
        ("{{ '<think' ~ state ~ '>' }}{{ question.instructions }}", "builds control tokens around it"),
        ("{{ raise_exception('no') }}", "prompt can be made"),
        ("{{ nothing.at.all }}", "prompt can be made"),
        ("{% for %}", "prompt can be made"),
    ],
)
def test_a_template_that_cannot_be_trusted_is_refused_at_the_start(template: str, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        Prompter(TOKENIZER, decision({"per_question": template}), max_tokens=100)


@pytest.mark.parametrize(
    ("source", "is_separable"),
    [
        ("{{ state }} {{ question.instructions }}", True),
        ("{{ question.type }} {{ state }}", True),
        ("{{ state }}{{ state }}", False),
        ("{{ state or 'nothing' }} {{ question.instructions }}", False),
        ("{{ state|upper }} {{ question.instructions }}", False),
        (
            "{{ state if state is string else state|tojson }}{{ ' ' if state is string }}{{ question.instructions }}",
            False,
        ),
    ],
)
def test_a_state_is_put_in_afterwards_only_where_that_changes_nothing(source: str, is_separable: bool) -> None:
    prompter = Prompter(TOKENIZER, decision({"per_question": source}), max_tokens=200)
    assert bool(prompter._separable) is is_separable
    for state in ("", "a", "<|im_end|> b", {"x": ["y", None]}, []):
        for question in (NOUL, CHOICE, SCORE, {"type": "choice", "instructions": {"a": 1}, "criteria": {"<": None}}):
            asked = request(state, q=question)
            (row,) = prompter.render(asked)
            assert prompter.render(asked) == [row]
            text = prompter._writer.render("per_question", prompter._tokens.fence(state), asked.questions)
            assert prompter._tokens.encode(text, Memo())[0] == row.input_ids


def test_what_a_template_cannot_write_is_the_clients_error() -> None:
    source = "{% if state is mapping and state.image %}{{ raise_exception('no images') }}{% endif %}{{ state }}"
    prompter = Prompter(TOKENIZER, decision({"per_question": source}), max_tokens=100)
    with pytest.raises(BadRequest, match="no images"):
        prompter.render(request({"image": "x"}, q=NOUL))


def test_a_dated_chat_template_prints_the_same_date_every_day() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE
    (row,) = Prompter(tokenizer, decision(), max_tokens=500).render(request("x", q=NOUL))
    assert tokenizer.decode(row.input_ids).startswith("26 Jul 2024")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"decision.json": "{"}, "decision.json"),
        ({"decision.json": '{"readout": "hands"}'}, "readout must be 'labels' or 'pointer', not 'hands'"),
        ({"decision.json": '{"readout": "pointer"}'}, "readout 'pointer' needs a decision_template.jinja"),
        ({"decision.json": "[]"}, "decision.json must hold a JSON object"),
        ({"decision_template.jinja": "{% if %}"}, "decision_template.jinja is not a template"),
        ({"decision.json": '{"adapter": "lora"}'}, "names an adapter"),
        ({"decision.json": '{"encoding": "joint"}'}, "encoding 'joint' has no template"),
        ({"decision.json": '{"temperature": {"noul": 0}}'}, "temperature.noul must be above 0"),
        ({"decision.json": '{"noul_options": ["yes", "no"]}'}, "decision.json"),
        (
            {"decision_template.jinja": "{{ question }}", "decision_template_per_question.jinja": "x"},
            "already the one for per_question",
        ),
    ],
)
def test_a_contradictory_format_is_one_line(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(StartupError) as caught:
        DecisionFormat.load(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
