"""A real engine serves the drafter: what it accepts, whether outputs stay the target's, and the speed-up.

Inputs:  the checkpoint's folder, its evaluation, every dataset's tokenized_data.jsonl, the target's folder.
Outputs: work/{target}/drafter/serving.json.

No part of `all`: it takes vLLM's environment (`make serve-check` sets it up) and starts two servers.
"""


rule serving:
    input:
        SERVING,


rule serve_check:
    input:
        weights=CHECKPOINT,
        config=f"{CHECKPOINT_FOLDER}/config.json",
        training=TRAINING,
        evaluation=EVALUATION,
        rows=expand(TOKENIZED, dataset=DATASETS),
        target=TARGET,
    output:
        serving=SERVING,
    log:
        f"{LOGS}/serve_check.log",
    benchmark:
        f"{BENCHMARKS}/serve_check.tsv"
    # Whatever else runs would be measured, too.
    threads: workflow.cores
    resources:
        gpu=1,
    params:
        settings=verbatim(CONFIG.serving.model_dump_json()),
        version=SERVING_VERSION,
    shell:
        "python scripts/serve_check.py --checkpoint {CHECKPOINT_FOLDER:q} --tokenized {input.rows:q}"
        " --target {input.target:q} --target-path {TARGET_PATH:q} --evaluation {input.evaluation:q}"
        " --settings {params.settings:q} --out {output.serving:q} --log {log:q}"
