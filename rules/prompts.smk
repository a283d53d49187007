"""Raw datasets to prompts and conversations.

Inputs:  the raw files that config names, local or on the hub.
Outputs: work/raw/{dataset}/source.json, beside pinned copies of the files;
         work/prompts/{dataset}/prompts.jsonl, or conversations.jsonl for native datasets;
         ledger.json (rows in = kept + skipped by reason) and rejects.jsonl beside either.
"""


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
    params:
        settings=lambda wildcards: CONFIG.datasets[
            wildcards.dataset
        ].source.model_dump_json(),
    shell:
        "python scripts/fetch_raw.py --dataset {wildcards.dataset}"
        " --settings {params.settings:q} --out {output.source:q} --log {log:q}"


rule build_prompts:
    input:
        source=SOURCE,
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
