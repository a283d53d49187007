"""Tokenized samples to hidden states.

Inputs:  tokenized_data.jsonl; the target's folder.
Outputs: work/{target}/hidden_states/{dataset}/manifest.json, which names every sample's states in the store
         by key and digest. What the answering pass left there already is not computed again.
"""


rule capture_states:
    input:
        rows=TOKENIZED,
        target=TARGET,
    output:
        manifest=MANIFEST,
    log:
        f"{LOGS}/capture_states/{{dataset}}.log",
    benchmark:
        f"{BENCHMARKS}/capture_states/{{dataset}}.tsv"
    threads: CONFIG.engine.threads
    resources:
        gpu=int(SERVER_CAPTURES and STARTS_SERVER),
        server=int(SERVER_CAPTURES),
    params:
        recipe=capture_recipe(CONFIG),
    shell:
        "python scripts/capture_states.py --dataset {wildcards.dataset} --tokenized {input.rows:q}"
        " --target {input.target:q} --target-path {TARGET_PATH:q} --recipe {params.recipe:q}"
        " --engine {ENGINE:q} --in-flight {IN_FLIGHT:q} --store {STORE:q} --out {output.manifest:q} --log {log:q}"
