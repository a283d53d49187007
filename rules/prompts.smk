"""Raw datasets to prompts and conversations.

Inputs:  the raw files that config names, local or on the hub.
Outputs: work/raw/{dataset}/source.json, beside pinned copies of the files;
         work/prompts/{dataset}/prompts.jsonl, or conversations.jsonl for native datasets;
         ledger.json (rows in = kept + skipped by reason) and rejects.jsonl beside either;
         work/prompts/selection.json where config expects a number of rows in all.
"""


def fetch_settings(wildcards):
    return source_settings(CONFIG.datasets[wildcards.dataset].source)


def prompts_benchmarks(wildcards):
    return benchmark_files(CONFIG.datasets[wildcards.dataset])


def prompts_params(wildcards):
    return prompts_settings(CONFIG.datasets[wildcards.dataset])


def prompts_code(wildcards):
    return code_files("build_prompts", CONFIG.datasets[wildcards.dataset].layout)


rule fetch_raw:
    input:
        files=lambda wildcards: raw_files(CONFIG.datasets[wildcards.dataset].source),
        code=code_files("fetch_raw"),
    output:
        source=SOURCE,
    log:
        f"{LOGS}/fetch_raw/{{dataset}}.log",
    benchmark:
        f"{BENCHMARKS}/fetch_raw/{{dataset}}.tsv"
    priority: priority_of
    params:
        settings=fetch_settings,
    shell:
        "python scripts/fetch_raw.py --dataset {wildcards.dataset}"
        " --settings {params.settings:q} --out {output.source:q} --log {log:q}"


rule build_prompts:
    input:
        source=SOURCE,
        benchmarks=prompts_benchmarks,
        code=prompts_code,
    output:
        rows=PROMPTS,
        ledger=PROMPTS_LEDGER,
        rejects=f"{WORK}/prompts/{{dataset}}/rejects.jsonl",
    log:
        f"{LOGS}/build_prompts/{{dataset}}.log",
    benchmark:
        f"{BENCHMARKS}/build_prompts/{{dataset}}.tsv"
    wildcard_constraints:
        dataset="|".join(PROMPT_DATASETS) or "(?!)",
    priority: priority_of
    params:
        settings=prompts_params,
    shell:
        "python scripts/build_prompts.py --dataset {wildcards.dataset}"
        " --settings {params.settings:q} --raw {input.source:q} --out {output.rows:q}"
        " --ledger {output.ledger:q} --rejects {output.rejects:q} --log {log:q}"


use rule build_prompts as build_conversations with:
    output:
        rows=CONVERSATIONS,
        ledger=PROMPTS_LEDGER,
        rejects=f"{WORK}/prompts/{{dataset}}/rejects.jsonl",
    log:
        f"{LOGS}/build_prompts/{{dataset}}.log",
    benchmark:
        f"{BENCHMARKS}/build_prompts/{{dataset}}.tsv"
    wildcard_constraints:
        dataset="|".join(NATIVE_DATASETS) or "(?!)",


rule check_selection:
    input:
        ledgers=expand(PROMPTS_LEDGER, dataset=DATASETS),
        code=code_files("check_selection"),
    output:
        selection=f"{WORK}/prompts/selection.json",
    log:
        f"{LOGS}/check_selection.log",
    benchmark:
        f"{BENCHMARKS}/check_selection.tsv"
    params:
        recipe=selection_recipe(CONFIG),
    shell:
        "python scripts/check_selection.py --ledgers {input.ledgers:q} --recipe {params.recipe:q}"
        " --out {output.selection:q} --log {log:q}"
