"""Tests reading a config: the file, the overrides, the types, and one message for all mistakes."""

import os
import re

import pytest

from gsa_study.study_file import load_study
from gsa_train.config import (
    Config,
    ConfigError,
    PhaseConfig,
    TrainConfig,
    config_from_yaml,
    config_to_yaml,
    load_config,
)
from gsa_train.config.load import field_names
from gsa_train.config.other_names import FIELD_OF, OTHER_NAMES
from helpers.broken_rules import rules_of

PHASE = "phases:\n  - {name: sparse, steps: 5}\n"


@pytest.fixture
def write(tmp_path):
    def write_yaml(text: str):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_yaml


def problems_of(path, overrides=(), **arguments) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, **arguments)
    assert isinstance(caught.value, ValueError)
    for problem in caught.value.problems:
        assert f"\n  {problem}" in str(caught.value)
    return caught.value.problems


def test_defaults_then_file_then_overrides(write):
    assert load_config(write("")) == Config()
    path = write(PHASE + "train: {seq_len_tokens: 512, micro_batch_size: 2}\n")
    config = load_config(path, ["train.micro_batch_size=4", "train.micro_batch_size=8"])
    assert config.train.global_batch_size == TrainConfig().global_batch_size
    assert config.train.seq_len_tokens == 512
    assert config.train.micro_batch_size == 8
    assert config.phases == [PhaseConfig(name="sparse", steps=5)]


@pytest.mark.parametrize(
    ("text", "override", "said"),
    [
        ("model:\n", "run.name=a", "model = null: no fields below it; leave it out for its defaults, or"),
        ("model: {num_layers: 2}\n", "model=null", "model = null: no fields below it"),
        ("phases:\n", "run.name=a", "phases = null: no value; write phases=[] for none, or leave it out"),
        (PHASE, "phases.0=null", "phases.0 = null: no fields below it; set its fields: name, "),
        ("phases:\n  - {name: a}\n  -\n", "run.name=a", "phases.1 = null: no fields below it"),
        ("data: {validation_sets: null}\n", "run.name=a", "data.validation_sets = null: no value"),
        ("evaluate: {tasks: }\n", "run.name=a", "evaluate.tasks = null: no value"),
    ],
)
def test_nothing_is_no_value_of_a_section_or_list(write, text, override, said):
    """An empty value would mean the defaults: a phase of 1000 steps for a stray dash."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(write(text), [override])


@pytest.mark.parametrize("phases", [["phases[1].steps=7"], ["phases=[{name: x, steps: 3}, {steps: 7}]"]])
def test_overrides_reach_list_items_and_replace_lists(write, phases):
    path = write("phases:\n  - {name: a, steps: 1}\n  - {name: b, steps: 2}\n")
    assert [each.steps for each in load_config(path, [*phases, "phases.0.steps=1"]).phases] == [1, 7]


OVERRIDES = [
    ("data.train_dir=s3://bucket/a=1", "s3://bucket/a=1"),
    ("data.tokenizer='a #1'", "a #1"),
    ("run.name= padded ", "padded"),
    ("train.adam_epsilon=1e-8", 1e-8),
    ("train.iterations_to_skip=[7,3]", [7, 3]),
    ("train.iterations_to_skip=[]", []),
    ("gsa.indexer_temperature=2", 2.0),
    ("gsa.indexer_temperature=learned", "learned"),
    ("train.adam_epsilon=1e-300", 1e-300),
    ("model.rope_base=0.30000000000000004", 0.1 + 0.2),
    ("model.norm_epsilon=5e-324", 5e-324),
    ("data.tokenizer=\"''\"", "''"),
    ("data.eos_token='ünïcode: #1'", "ünïcode: #1"),
    # The field decides what a word means.
    ("run.dir='null'", "null"),
    ("gsa.adaptive_k=off", "off"),
    ("gsa.value_gate=off", False),
    ("parallel.sequence=no", False),
    ("run.name=1e3", "1e3"),
    ("logging.wandb_project=2026-01-01", "2026-01-01"),
    # A name of digits is not an item's number, and a dot in a name starts no field.
    ("data.source_weights.2019=1e-1", {"2019": 0.1}),
    ("data.source_weights.dolma-v1.7/cc=0.5", {"dolma-v1.7/cc": 0.5}),
]


@pytest.mark.parametrize(("override", "value"), OVERRIDES)
def test_what_an_override_means(write, override, value):
    config = load_config(write(PHASE), [override])
    section, name, *_ = override.partition("=")[0].split(".")
    found = getattr(getattr(config, section), name)
    assert (found, type(found)) == (value, type(value))
    assert load_config(write(config_to_yaml(config))) == config


def test_validation_sets_by_name_in_their_order(write):
    path = write(PHASE + "data: {validation_dir: /v, validation_sets: {wiki: /a, books: /b}}\n")
    config = load_config(path, ["data.validation_sets.code=s3://x/y=1", "data.validation_sets.wiki=/c"])
    found = list(config.data.validation_folders.items())
    assert found == [("wiki", "/c"), ("books", "/b"), ("code", "s3://x/y=1")]
    assert load_config(write(config_to_yaml(config))) == config
    assert load_config(path, ["data.validation_sets={}"]).data.validation_folders == {"validation": "/v"}


# ---- mistakes


def test_names_of_other_frameworks_lead_to_fields():
    fields = field_names(Config)
    assert [field for field in OTHER_NAMES if field not in fields] == []
    assert len(FIELD_OF) == sum(len(names.split()) for names in OTHER_NAMES.values())
    ours = {part for field in fields for part in (field.split(".")[-1], field.split(".")[0])}
    assert ours & set(FIELD_OF) == set()


MISTAKES = r"""
gsa.selection_block=32 -> gsa.selection_block = 32: removed; release studies-0.1 or commit 56919bd1 has it; use that
gsa.key_group_size=16 -> gsa.key_group_size = 16: removed; release studies-0.1 or commit 56919bd1 has it; use that
model.num_layer=3 -> model.num_layer = 3 | did you mean model.num_layers? | Keys of model: | head_dim
evaluate.prompts=[once] -> evaluate.prompts = ['once']: removed; release studies-0.1 or commit 56919bd1 has it
monitor.max_rewinds=5 -> monitor.max_rewinds = 5: removed; release studies-0.1 or commit 56919bd1 has it
monitor.action=rewind -> monitor.action = rewind | log, skip
modle.num_layers=3 -> modle = {...} | did you mean model? | Sections: | phases
phases.0.step=3 -> phases.0.step = 3 | did you mean phases.0.steps? | Keys of phases.0: | min_lr
model.seq_len_tokens=3 -> unknown key | did you mean train.seq_len_tokens?
seed=3 -> unknown key | did you mean run.seed or data.seed?
train.steps=3 -> unknown key | did you mean phases.0.steps or profile.steps?
tensor_model_parallel_size=2 -> unknown key | did you mean parallel.tensor?
evaluate.interval=3 -> unknown key | did you mean evaluate.every_steps?
optimizer.lr=3 -> optimizer = {...}: unknown key; did you mean phases.0.lr?
model.zzz=3 -> unknown key | remove it | Keys of model:
model.num_layers=four -> model.num_layers = four | not an integer | model.num_layers=4
model.num_layers=4.0 -> model.num_layers = 4.0 | not an integer
model.num_layers=true -> not an integer
model.num_layers=[1, 2] -> not an integer
model.num_layers=null -> model.num_layers = null | no value
model.qk_norm=2 -> model.qk_norm = 2: not true or false
model.qk_norm=maybe -> model.qk_norm = maybe | not true or false
model.rope_base=big -> model.rope_base = big | not a number
run.dir="a\0" -> run.dir = 'a\x00': not plain text
run.name=${data.train_dir} -> run.name | not plain text
data.validation_sets.wiki=null -> data.validation_sets.wiki = null | no value | remove the name
data.validation_sets.wiki=[1] -> data.validation_sets.wiki | not plain text
data.validation_sets.wi-ki=/x -> wi-ki is not a plain name | letters, digits
data.validation_sets=/x -> = /x: not a value under a name | data.validation_sets.NAME=VALUE
validation_sets.x=/x -> unknown key | did you mean data.validation_sets?
data.source_weights.a=much -> data.source_weights.a = much: not a number
gsa.adaptive_k=of -> gsa.adaptive_k = of | not one of inverse, direct, off
model=3 -> model = 3 | not a section | num_layers
phases=3 -> phases = 3 | not a list
train.iterations_to_skip=3 -> train.iterations_to_skip = 3 | not a list | an integer | =[1, 2]
train.iterations_to_skip=[1, x] -> train.iterations_to_skip | each item is an integer
phases=[3] -> phases.0 = 3 | not a section | steps
phases.3.steps=1 -> phases.3.steps = 1 | phases has no item 3 | 0
train.batch_ramp.0.until_tokens=9 -> train.batch_ramp has no item 0 | write the list: train.batch_ramp=[...]
phases.².steps=1 -> phases has no item ²
model.num_layers.x=1 -> model.num_layers is not a section
train.grad_clip= -> train.grad_clip | no value after the = | train.grad_clip=VALUE
train.grad_clip -> train.grad_clip | not of the form key=value
=3 -> not of the form key=value
run.name=[a -> run.name = [a | not readable as YAML
model={num_layers: 2} -> model | several fields at once
run.name=trial #2 -> run.name = trial #2 | a comment from # on | in quotes
"""
LARGE = [
    ([f"run.seed={10**18}"], [f"run.seed = {10**18}: more than 18 digits; write for example run.seed=1234"]),
    ([f"train.iterations_to_skip=[-{10**18}]"], ["not a list where each item is an integer"]),
    ([f"run.name={'[' * 5000}"], ["run.name = [[", "nested more than 64 levels deep"]),
    ([f"{'a.' * 5000}b=1"], ["unknown key"]),
]


@pytest.mark.parametrize(("overrides", "fragments"), [*rules_of(MISTAKES), *LARGE])
def test_a_mistake_names_field_value_and_remedy(write, overrides, fragments):
    (problem,) = problems_of(write(PHASE + "model: {num_layers: 4}\n"), overrides)
    assert [fragment for fragment in fragments if fragment not in problem] == []


def test_all_mistakes_are_reported_at_once(write):
    text = PHASE + "model: {num_layer: 3, num_heads: five, head_dim: 63}\ntrain: {grad_clip: -1}\n"
    overrides = ["nonsense", "gsa.k_min=9000", "phases.0.min_lr=1"]
    found = problems_of(write(text), overrides, world_size=3, need_data=False)
    expected = [
        "nonsense: not of", "model.num_layer = 3: unknown", "model.num_heads = five: not an integer",
        "train.grad_clip = -1.0: negative", "model.head_dim = 63: odd", "gsa.k_min = 9000: above gsa.k_base",
        "train.global_batch_size = 8: not a multiple", "phases.0.min_lr = 1.0: above phases.0.lr",
    ]  # fmt: skip
    assert len(found) == len(expected)
    for start in expected:
        assert sum(problem.startswith(start) for problem in found) == 1, start


def test_what_follows_from_a_mistake_is_not_reported_again(write):
    # With the default of num_layers, 4, the stages would not divide; but the file sets the field, misspelled.
    path = write(PHASE + "model: {num_layer: 6}\nparallel: {pipeline: 3}\n")
    (problem,) = problems_of(path, world_size=3, need_data=False)
    assert "did you mean model.num_layers" in problem


UNREADABLE = [
    ("model:\n  num_layers: [3\n", "line 3"),
    ("model: {a: *b}\n", "aliases"),
    (f"model: {'[' * 5000}{']' * 5000}\n", "nested more than 64 levels deep"),
    ("".join(" " * level + "a:\n" for level in range(300)), "nested more than 64 levels deep"),
    (f"# {'x' * (1 << 22)}\n", "more than the 4194304 that such a file may have"),
    ("- 1\n- 2\n", "holds a list"),
    ("a: 1\n---\nb: 2\n", "line 2"),
    ("[a, b]: 1\n", "line 1"),
    ("run: !!python/object:os.system {}\n", "line 1"),
    ("model:\n  num_layers: 3\n  num_heads: 2\n  num_layers: 4\n", "num_layers is already set in line 2"),
]


@pytest.mark.parametrize(("text", "said"), UNREADABLE)
def test_unreadable_yaml(write, text, said):
    (problem,) = problems_of(write(text))
    assert said in problem


def test_unreadable_files(tmp_path):
    missing = tmp_path / "missing.yaml"
    (problem,) = problems_of(missing, ["phases.0.steps=3"], world_size=1)
    assert "No such file" in problem
    assert "Is a directory" in problems_of(tmp_path)[0]
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "is a pipe, no regular file; give a regular file" in problems_of(tmp_path / "pipe.yaml")[0]
    assert "is a device" in problems_of("/dev/zero")[0]
    with pytest.raises(ConfigError, match=r"missing\.yaml\); give the path of a study file$"):
        load_study(missing)
    (tmp_path / "binary.yaml").write_bytes(b"run: \xff\xfe")
    assert problems_of(tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        load_config(missing)


# ---- writing


def test_what_a_saved_config_has_of_another_version(write):
    """Nobody can remove a field from a checkpoint."""
    saved = config_to_yaml(Config()).replace("model:\n", "model:\n  future: 3\n")
    with pytest.raises(ConfigError) as caught:
        config_from_yaml(saved, "saved.pt")
    said = "model.future = 3: unknown key; use the version of gsa_train that saved it"
    assert str(caught.value) == f"saved.pt: 1 problem\n  {said}"
    removed = "gsa:\n  reuse_teacher: leader\n  selection_query: first\n  selection_block: 1\n"
    removed += "  key_group_size: 1\n"
    for plots in ("true", "false"):  # whatever the run drew
        assert load_config(write(f"logging:\n  plots: {plots}\n")) == Config()
    saved = config_to_yaml(Config()).replace("gsa:\n", removed)
    saved = saved.replace("initial_text: fresh", "initial_text: anew")
    assert "initial_text: anew" in saved
    assert load_config(write(saved)) == config_from_yaml(saved, "common.pt") == Config()
    rewinding = saved.replace("monitor:\n  action: log", "monitor:\n  max_rewinds: 5\n  action: rewind")
    assert config_from_yaml(rewinding, "common.pt").monitor.action == "stop"
    with pytest.raises(ConfigError, match=r"gsa\.reuse_teacher = group: removed; .*; use the version"):
        config_from_yaml(saved.replace("leader", "group"), "common.pt")
