"""Tokenized samples to hidden states.

Inputs:  tokenized_data.jsonl; the target's folder; where the likeliest tokens of the draft vocabulary are stored
         (hidden_states.top_tokens) vocabulary.json, and so every dataset's tokens.
Outputs: work/{target}/hidden_states/{dataset}/manifest.json, which names every sample's states in the store
         by key and digest. What the answering pass left there already is not computed again.
"""


rule capture_states:
    input:
        rows=TOKENIZED,
        target=TARGET,
        vocabulary=VOCABULARY if CONFIG.hidden_states.top_tokens else [],
    output:
        manifest=MANIFEST,
    log:
        f"{LOGS}/capture_states/{{dataset}}.log",
    benchmark:
        f"{BENCHMARKS}/capture_states/{{dataset}}.tsv"
    threads: CONFIG.engine.threads
    params:
        recipe=capture_recipe(CONFIG),
    shell:
        "python scripts/capture_states.py --dataset {wildcards.dataset} --tokenized {input.rows:q}"
        " --target {input.target:q} --target-path {TARGET_PATH:q} --recipe {params.recipe:q}"
        " --vocabulary {input.vocabulary:q} --disk-reserve {CONFIG.hidden_states.disk_reserve}"
        " --engine {ENGINE:q} --store {STORE:q} --out {output.manifest:q} --log {log:q}"
