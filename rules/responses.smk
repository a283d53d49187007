"""Prompts to tokenized samples: the target answers them, or a native dataset's answers are tokenized.

Inputs:  prompts.jsonl or conversations.jsonl; the target's folder.
Outputs: work/{target}/target.json, the target's identity by content;
         work/{target}/tokenized/{dataset}/tokenized_data.jsonl and ledger.json.
Answers, and the hidden states of the pass that made them, go to the store first: a rerun asks for nothing
that is there.
"""


def target_files(wildcards):
    """The target's files that are there; a missing target is reported by the job, in words."""
    return sorted(str(path) for path in CONFIG.target.path.glob("*") if path.is_file())


rule identify_target:
    input:
        files=target_files,
    output:
        target=TARGET,
    log:
        f"{LOGS}/identify_target.log",
    benchmark:
        f"{BENCHMARKS}/identify_target.tsv"
    params:
        settings=verbatim(target_settings(CONFIG.target)),
    shell:
        "python scripts/identify_target.py --settings {params.settings:q} --out {output.target:q} --log {log:q}"


rule answer_prompts:
    input:
        prompts=PROMPTS,
        target=TARGET,
    output:
        rows=TOKENIZED,
        ledger=TOKENIZED_LEDGER,
    log:
        f"{LOGS}/answer_prompts/{{dataset}}.log",
    benchmark:
        f"{BENCHMARKS}/answer_prompts/{{dataset}}.tsv"
    wildcard_constraints:
        dataset="|".join(PROMPT_DATASETS) or "(?!)",
    priority: priority_of
    threads: CONFIG.engine.threads
    resources:
        gpu=int(STARTS_SERVER),
        server=int(ASKS_SERVER),
    params:
        recipe=lambda wildcards: answering_recipe(CONFIG, wildcards.dataset),
    shell:
        "python scripts/answer_prompts.py --dataset {wildcards.dataset} --prompts {input.prompts:q}"
        " --target {input.target:q} --target-path {TARGET_PATH:q} --recipe {params.recipe:q}"
        " --states {STATES:q} --engine {ENGINE:q} --in-flight {IN_FLIGHT:q} --store {STORE:q}"
        " --out {output.rows:q} --ledger {output.ledger:q} --log {log:q}"


rule tokenize_conversations:
    input:
        conversations=CONVERSATIONS,
        target=TARGET,
    output:
        rows=TOKENIZED,
        ledger=TOKENIZED_LEDGER,
    log:
        f"{LOGS}/tokenize_conversations/{{dataset}}.log",
    benchmark:
        f"{BENCHMARKS}/tokenize_conversations/{{dataset}}.tsv"
    wildcard_constraints:
        dataset="|".join(NATIVE_DATASETS) or "(?!)",
    params:
        recipe=lambda wildcards: tokenizing_recipe(CONFIG, wildcards.dataset),
    shell:
        "python scripts/tokenize_conversations.py --dataset {wildcards.dataset}"
        " --conversations {input.conversations:q} --target {input.target:q} --target-path {TARGET_PATH:q}"
        " --recipe {params.recipe:q} --out {output.rows:q} --ledger {output.ledger:q} --log {log:q}"
