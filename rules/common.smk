"""What every rule shares: the checked configuration, the paths of all targets, and recipes.

A recipe is what changes a stage's result and nothing else; it reaches the stage's command as JSON and
Snakemake as a parameter. What changes no result (threads, batch sizes) goes into the command only.
"""

import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(workflow.basedir) / "scripts"))

from eyrie.build_lock import hold_while_building
from eyrie.code_inputs import code_files
from eyrie.config import CONFIG_FILES_VARIABLE, ConfigError, parse_config
from eyrie.records import canonical_json, write_json
from eyrie.recipes import (
    EVALUATION_VERSION,
    SERVING_VERSION,
    answering_priority,
    answering_recipe,
    benchmark_files,
    capture_recipe,
    card_recipe,
    drafter_recipe,
    estimate_recipe,
    pinned_vocabulary,
    prompts_settings,
    raw_files,
    report_recipe,
    requests_in_flight,
    scaling_recipe,
    selection_recipe,
    share_recipe,
    source_settings,
    target_settings,
    tokenizing_recipe,
    training_aside,
    warm_start_files,
)
from eyrie.safe_values import secrets_in
from eyrie.serving import server_urls

# Jobs run the interpreter that runs Snakemake, whether or not its environment was activated.
os.environ["PATH"] = os.pathsep.join(
    [str(Path(sys.executable).parent), os.environ["PATH"]]
)
# Error messages look the line of a key up in these.
os.environ[CONFIG_FILES_VARIABLE] = os.pathsep.join(
    str(path) for path in workflow.configfiles
)

hold_while_building()

try:
    CONFIG = parse_config(config)
except ConfigError as error:
    raise WorkflowError(f"The configuration has mistakes:\n{error}") from None

for secret in secrets_in(CONFIG.engine.command or "none"):
    logger.warning(
        f"engine.command: {secret}. It stands in logs, manifests and `ps`: export secrets instead"
    )

DATASETS = sorted(CONFIG.datasets)
PROMPT_DATASETS = [name for name in DATASETS if CONFIG.datasets[name].kind == "prompts"]
NATIVE_DATASETS = [name for name in DATASETS if CONFIG.datasets[name].kind == "native"]

WORK = str(CONFIG.work)
BUILD = f"{WORK}/{CONFIG.target.name}"
STORE = f"{WORK}/store"
LOGS = f"{WORK}/logs"
BENCHMARKS = f"{WORK}/benchmarks"
SOURCE = f"{WORK}/raw/{{dataset}}/source.json"
PROMPTS = f"{WORK}/prompts/{{dataset}}/prompts.jsonl"
CONVERSATIONS = f"{WORK}/prompts/{{dataset}}/conversations.jsonl"
PROMPTS_LEDGER = f"{WORK}/prompts/{{dataset}}/ledger.json"
# Only a build that expects a number of rows counts them.
SELECTION = [f"{WORK}/prompts/selection.json"] if CONFIG.expected_by_kind() else []
TARGET = f"{BUILD}/target.json"
TOKENIZED = f"{BUILD}/tokenized/{{dataset}}/tokenized_data.jsonl"
TOKENIZED_LEDGER = f"{BUILD}/tokenized/{{dataset}}/ledger.json"
MANIFEST = f"{BUILD}/hidden_states/{{dataset}}/manifest.json"
VOCABULARY = f"{BUILD}/drafter/vocabulary.json"
CHECKPOINT_FOLDER = f"{BUILD}/drafter/checkpoint"
CHECKPOINT = f"{CHECKPOINT_FOLDER}/model.safetensors"
TRAINING = f"{CHECKPOINT_FOLDER}/training.json"
TRAINING_LINES = f"{BUILD}/drafter/training.jsonl"
CARD = f"{CHECKPOINT_FOLDER}/README.md"
EVALUATION = f"{BUILD}/drafter/evaluation.json"
ACCEPTANCE = f"{BUILD}/drafter/acceptance.json"
SCALING = f"{BUILD}/scaling/scaling.json"
SERVING = f"{BUILD}/drafter/serving.json"
REPORT = f"{BUILD}/report.html"

TARGET_PATH = str(CONFIG.target.path)
ENGINE = canonical_json(CONFIG.engine.model_dump(mode="json"))
IN_FLIGHT = requests_in_flight(CONFIG)
# A job that starts a server takes all of the host's GPUs: one at a time. Of jobs that ask a running server,
# as many as the profile allows: the last answers of one dataset and the first of the next share it.
ASKS_SERVER = CONFIG.engine.kind != "in_process"
STARTS_SERVER = ASKS_SERVER and not (server_urls() or CONFIG.engine.urls)
# Servers may leave hidden states, too; else capture jobs run the target themselves.
SERVER_CAPTURES = CONFIG.engine.capture != "in_process"
# Which states the answering pass leaves in the store on its way; its own result does not depend on them.
STATES = canonical_json(CONFIG.hidden_states.model_dump(mode="json"))


wildcard_constraints:
    dataset="|".join(DATASETS),


def priority_of(wildcards):
    """Which datasets are answered first."""
    return answering_priority(CONFIG, wildcards.dataset)


onstart:
    write_json(Path(WORK) / "config.json", CONFIG.model_dump(mode="json"))


def verbatim(text):
    """A parameter that is taken as it is: Snakemake takes {words} in a plain one for wildcards."""
    return lambda wildcards: text


def option(flag, value):
    """A flag with its value as words of a command; nothing where the value is null."""
    return "" if value is None else f"{flag} {shlex.quote(str(value))}"


def conversation_rows(dataset):
    """The rows that a dataset's raw files are read into."""
    native = CONFIG.datasets[dataset].kind == "native"
    return (CONVERSATIONS if native else PROMPTS).format(dataset=dataset)


for name in DATASETS:

    rule:
        name:
            name
        input:
            TOKENIZED.format(dataset=name),
            MANIFEST.format(dataset=name),
