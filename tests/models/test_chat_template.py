"""Chat templates: what a checkpoint's files say, rendered as Hugging Face renders it."""

import json

import pytest

from jaxbuf.models.chat_template import read_chat_template
from jaxbuf.models.language_model import load
from jaxbuf.models.loading.checkpoint import CheckpointError, save
from tests.serving.conftest import byte_tokenizer
from tests.serving.conftest import lm as lm  # the tiny random model; a fixture
from tests.tiny import changed

CHATML = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + eos_token + '\\n' }}
{%- endif %}
{% for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- elif message.role not in ('user', 'assistant') %}
        {{- raise_exception('no role ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TALK = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "Hi & hello"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "{{ 1 + 1 }}"},
]
SPECIAL = {"eos_token": "<|im_end|>", "bos_token": None, "pad_token": {"content": "<|endoftext|>"}}


def write_chat_model(lm, directory, **changes):
    """A checkpoint of the tiny model with a ChatML template and special tokens, its configuration with `changes`."""
    save(lm.model, changed(lm.config, **changes), directory, dtype="float32")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(SPECIAL | {"chat_template": CHATML}))
    return directory


def template(directory, source, **config):
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, **config}))
    return read_chat_template(directory)


def test_a_conversation_is_rendered_by_the_checkpoints_template(lm, tmp_path):
    found = load(write_chat_model(lm, tmp_path))
    expected = (
        "<|im_start|>system\nBe <brief>.<|im_end|>\n<|im_start|>user\nHi & hello<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\n{{ 1 + 1 }}<|im_end|>\n"
    )
    assert found.chat(TALK) == expected + "<|im_start|>assistant\n"
    assert found.chat(TALK, add_generation_prompt=False) == expected
    ids = found.encode(found.chat(TALK), add_special_tokens=False)
    start, end = (found.tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert (ids.count(start), ids.count(end)) == (5, 4)
    assert found.chat_template.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_a_separate_file_comes_first(tmp_path):
    template(tmp_path, "inside", eos_token="</s>")
    (tmp_path / "chat_template.jinja").write_text("beside {{ eos_token }} — {{ messages|length }}")
    assert read_chat_template(tmp_path).render(TALK) == "beside </s> — 4"


def test_of_several_templates_the_default_is_taken(tmp_path):
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert template(tmp_path, several).render(TALK) == "plain"
    with pytest.raises(CheckpointError, match='no chat_template is named "default", only tool_use'):
        template(tmp_path, several[:1])
    with pytest.raises(CheckpointError, match="chat_template must be a text"):
        template(tmp_path, 7)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content|tojson }}", '"Be <brief>."'),
        ("{{ 'é & é'|tojson }}", '"é & é"'),
        ("{{ messages[0]|tojson(indent=1) }}", '{\n "role": "system",\n "content": "Be <brief>."\n}'),
        ("  {% if true %}\n x\n  {% endif %}\n", " x\n"),
        (
            "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}.{% endfor %}",
            "system.user.",
        ),
        ("{{ tools is none }} {{ documents is none }} {{ bos_token is defined }}", "True True False"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "4"),
    ],
)
def test_templates_find_what_they_are_written_for(tmp_path, source, expected):
    assert template(tmp_path, source).render(TALK) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ missing.content }}", "'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_fails_is_an_error_that_names_its_file(tmp_path, source, message):
    found = template(tmp_path, source)
    with pytest.raises(ValueError, match=f"the chat template of .*tokenizer_config.json failed: .*{message}"):
        found.render(TALK)


@pytest.mark.parametrize("messages", [[], None, "Hi", {"role": "user"}, ["Hi"], [{"content": "Hi"}]])
def test_messages_of_another_form_are_refused(tmp_path, messages):
    with pytest.raises(ValueError, match="messages must be a list of"):
        template(tmp_path, CHATML).render(messages)


def test_a_model_without_a_template_says_what_was_looked_for():
    with pytest.raises(
        ValueError, match=r"'demo' .* no chat_template.jinja, .* tokenizer_config.json; `jaxbuf generate`"
    ):
        load("demo").chat(TALK)
