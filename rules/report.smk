"""Everything to one page.

Inputs:  sources, rows, the ledgers of both row stages, the manifests, the vocabulary, training.json and
         training.jsonl, evaluation.json, acceptance.json; scaling.json and serving.json where they were made.
Outputs: work/{target}/report.html, a single file that opens without a network.
"""

from glob import glob

from eyrie.records import sha256_file

# Wall times differ from run to run: a build that must repeat to the byte leaves them out.
TIMES = option("--benchmarks", BENCHMARKS if CONFIG.evaluation.measure_speed else None)
EVIDENCE = {
    "scaling": SCALING,
    "serving": SERVING,
}


def evidence_there():
    """Digests of the evidence that not every build makes, where it was made.

    As a parameter and not as inputs: the report gets stale when a file of these appears, changes or goes,
    and yet building the report never starts what makes them.
    """
    return {
        name: sha256_file(Path(path))
        for name, path in EVIDENCE.items()
        if Path(path).exists()
    }


EVIDENCE_THERE = evidence_there()
EVIDENCE_FLAGS = " ".join(
    option(f"--{name}", EVIDENCE[name]) for name in EVIDENCE_THERE
)


rule report:
    input:
        REPORT,


rule build_report:
    input:
        sources=expand(SOURCE, dataset=DATASETS),
        ledgers=expand(PROMPTS_LEDGER, dataset=DATASETS)
        + expand(TOKENIZED_LEDGER, dataset=DATASETS),
        rows=expand(TOKENIZED, dataset=DATASETS),
        manifests=expand(MANIFEST, dataset=DATASETS),
        target=TARGET,
        vocabulary=VOCABULARY,
        training=TRAINING,
        lines=TRAINING_LINES,
        evaluation=EVALUATION,
        acceptance=ACCEPTANCE,
        code=code_files("build_report"),
        templates=sorted(glob("scripts/eyrie/report/templates/**/*.*", recursive=True)),
    output:
        report=report(
            REPORT,
            caption="../report/report.rst",
            category="Evidence",
            labels={"what": "all of it on one page"},
        ),
    log:
        f"{LOGS}/build_report.log",
    benchmark:
        f"{BENCHMARKS}/build_report.tsv"
    params:
        recipe=verbatim(report_recipe(CONFIG)),
        evidence=EVIDENCE_THERE,
    shell:
        "python scripts/build_report.py --config {WORK:q}/config.json --ledgers {input.ledgers:q}"
        " --tokenized {input.rows:q} --manifests {input.manifests:q} --vocabulary {input.vocabulary:q}"
        " --checkpoint {CHECKPOINT_FOLDER:q} --training-log {input.lines:q} --evaluation {input.evaluation:q}"
        " --acceptance {input.acceptance:q} {EVIDENCE_FLAGS} {TIMES} --out {output.report:q} --log {log:q}"
