"""Samples and hidden states to a drafter.

Inputs:  every dataset's tokenized_data.jsonl and manifest.json; the target's folder.
Outputs: work/{target}/drafter/vocabulary.json, the tokens that the drafter can propose;
         work/{target}/drafter/checkpoint/, which vLLM and SGLang load;
         work/{target}/drafter/training.jsonl, a line for each step and each validation.
"""

PINNED = option("--pinned", next(iter(pinned_vocabulary(CONFIG)), None))
WARM_START = option("--warm-start", CONFIG.training.warm_start)
# What no second run repeats is told where the build is told to measure speed.
RATES = "--rates" if CONFIG.evaluation.measure_speed else ""
TRAINING_ASIDE = training_aside(CONFIG)
TRAINER = (
    "python"
    if CONFIG.training.processes == 1
    else f"torchrun --standalone --nproc-per-node {CONFIG.training.processes}"
)


rule drafter:
    input:
        CHECKPOINT,


rule build_vocabulary:
    input:
        rows=expand(TOKENIZED, dataset=DATASETS),
        target=TARGET,
        pinned=pinned_vocabulary(CONFIG),
        # Nothing is trained before the counts are right; that they were checked anew changes nothing.
        selection=ancient(SELECTION),
        code=code_files("build_vocabulary"),
    output:
        vocabulary=VOCABULARY,
    log:
        f"{LOGS}/build_vocabulary.log",
    benchmark:
        f"{BENCHMARKS}/build_vocabulary.tsv"
    params:
        size=CONFIG.drafter.draft_vocab_size,
        coverage=option("--min-coverage", CONFIG.drafter.min_coverage),
    shell:
        "python scripts/build_vocabulary.py --tokenized {input.rows:q} --target {input.target:q}"
        " --size {params.size} {params.coverage} {PINNED} --out {output.vocabulary:q} --log {log:q}"


rule train_drafter:
    input:
        rows=expand(TOKENIZED, dataset=DATASETS),
        manifests=expand(MANIFEST, dataset=DATASETS),
        vocabulary=VOCABULARY,
        target=TARGET,
        warm_start=warm_start_files(CONFIG),
    output:
        weights=CHECKPOINT,
        config=f"{CHECKPOINT_FOLDER}/config.json",
        training=report(
            TRAINING,
            caption="../report/checkpoint.rst",
            category="Drafter",
            labels={"what": "recipe and inputs"},
        ),
        lines=report(
            TRAINING_LINES,
            caption="../report/training.rst",
            category="Drafter",
            labels={"what": "training log"},
        ),
    log:
        f"{LOGS}/train_drafter.log",
    benchmark:
        f"{BENCHMARKS}/train_drafter.tsv"
    threads: CONFIG.training.threads * CONFIG.training.processes
    params:
        recipe=drafter_recipe(CONFIG),
        rates=RATES,
        folder=subpath(output.weights, parent=True),
    shell:
        "{TRAINER} scripts/train_drafter.py --tokenized {input.rows:q} --manifests {input.manifests:q}"
        " --vocabulary {input.vocabulary:q} --target {input.target:q} --target-path {TARGET_PATH:q}"
        " --recipe {params.recipe:q} --aside {TRAINING_ASIDE:q} {WARM_START} {params.rates}"
        " --store {STORE:q} --out-dir {params.folder:q} --training-log {output.lines:q} --log {log:q}"
