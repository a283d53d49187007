"""Everything to one page.

Inputs:  the ledgers of both row stages, the manifests, the vocabulary, training.json, evaluation.json.
Outputs: work/{target}/report.html, a single file that opens without a network.
"""

# Wall times differ from run to run: a build that must repeat to the byte leaves them out.
TIMES = option("--benchmarks", BENCHMARKS if CONFIG.evaluation.measure_speed else None)


rule report:
    input:
        REPORT,


rule build_report:
    input:
        ledgers=expand(PROMPTS_LEDGER, dataset=DATASETS)
        + expand(TOKENIZED_LEDGER, dataset=DATASETS),
        manifests=expand(MANIFEST, dataset=DATASETS),
        vocabulary=VOCABULARY,
        training=TRAINING,
        evaluation=EVALUATION,
        code=code_files("build_report"),
        template="scripts/eyrie/report/template.html",
    output:
        report=REPORT,
    log:
        f"{LOGS}/build_report.log",
    benchmark:
        f"{BENCHMARKS}/build_report.tsv"
    params:
        recipe=verbatim(report_recipe(CONFIG)),
    shell:
        "python scripts/build_report.py --config {WORK:q}/config.json --ledgers {input.ledgers:q}"
        " --manifests {input.manifests:q} --vocabulary {input.vocabulary:q} --training {input.training:q}"
        " --evaluation {input.evaluation:q} {TIMES} --out {output.report:q} --log {log:q}"
