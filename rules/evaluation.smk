"""The drafter judged on the held-out share, and its model card.

Inputs:  the checkpoint's folder, every dataset's tokenized_data.jsonl and manifest.json, the target's folder.
Outputs: work/{target}/drafter/evaluation.json, measured by decoding held-out prompts;
         work/{target}/drafter/acceptance.json, estimated from all held-out samples' stored states;
         work/{target}/drafter/checkpoint/README.md, the model card, which tells the evaluation's figures.
"""


rule evaluation:
    input:
        EVALUATION,
        ACCEPTANCE,
        CARD,


rule evaluate_drafter:
    input:
        weights=CHECKPOINT,
        config=f"{CHECKPOINT_FOLDER}/config.json",
        rows=expand(TOKENIZED, dataset=DATASETS),
        target=TARGET,
    output:
        evaluation=report(
            EVALUATION,
            caption="../report/evaluation.rst",
            category="Evidence",
            labels={"what": "evaluation in figures"},
        ),
    log:
        f"{LOGS}/evaluate_drafter.log",
    benchmark:
        f"{BENCHMARKS}/evaluate_drafter.tsv"
    threads: CONFIG.evaluation.threads
    params:
        settings=CONFIG.evaluation.model_dump_json(exclude={"estimate_rows"}),
        version=EVALUATION_VERSION,
    shell:
        "python scripts/evaluate_drafter.py --checkpoint {CHECKPOINT_FOLDER:q} --tokenized {input.rows:q}"
        " --target {input.target:q} --target-path {TARGET_PATH:q} --settings {params.settings:q}"
        " --out {output.evaluation:q} --log {log:q}"


rule estimate_acceptance:
    input:
        weights=CHECKPOINT,
        config=f"{CHECKPOINT_FOLDER}/config.json",
        rows=expand(TOKENIZED, dataset=DATASETS),
        manifests=expand(MANIFEST, dataset=DATASETS),
        target=TARGET,
    output:
        acceptance=ACCEPTANCE,
    log:
        f"{LOGS}/estimate_acceptance.log",
    benchmark:
        f"{BENCHMARKS}/estimate_acceptance.tsv"
    threads: CONFIG.evaluation.threads
    params:
        recipe=estimate_recipe(CONFIG),
        folder=subpath(input.weights, parent=True),
    shell:
        "python scripts/estimate_acceptance.py --checkpoint {params.folder:q} --tokenized {input.rows:q}"
        " --manifests {input.manifests:q} --target {input.target:q} --target-path {TARGET_PATH:q}"
        " --recipe {params.recipe:q} --store {STORE:q} --threads {threads}"
        " --device {CONFIG.training.device} --out {output.acceptance:q} --log {log:q}"


rule write_card:
    input:
        weights=CHECKPOINT,
        config=f"{CHECKPOINT_FOLDER}/config.json",
        training=TRAINING,
        evaluation=EVALUATION,
        ledgers=expand(PROMPTS_LEDGER, dataset=DATASETS)
        + expand(TOKENIZED_LEDGER, dataset=DATASETS),
        target=TARGET,
        code=code_files("write_card"),
    output:
        card=CARD,
    log:
        f"{LOGS}/write_card.log",
    params:
        recipe=verbatim(card_recipe(CONFIG)),
    shell:
        "python scripts/write_card.py --checkpoint {CHECKPOINT_FOLDER:q} --target {input.target:q}"
        " --target-path {TARGET_PATH:q} --evaluation {input.evaluation:q} --ledgers {input.ledgers:q}"
        " --recipe {params.recipe:q} --out {output.card:q} --log {log:q}"
