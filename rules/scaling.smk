"""What more training data would bring: drafters on shares of the training groups, judged alike.

Inputs:  what train_drafter takes; the build's own drafter, which is the one on all groups, and its figures.
Outputs: work/{target}/scaling/{share}/checkpoint/ and acceptance.json of each share (1-8 is an eighth);
         work/{target}/scaling/scaling.json, acceptance against training tokens with a fitted curve.
"""

SHARE = f"{BUILD}/scaling/{{share}}"
SHARES = [share.replace("/", "-") for share in CONFIG.scaling.shares]


wildcard_constraints:
    share=r"\d+-\d+",


rule scaling:
    input:
        SCALING,


use rule train_drafter as train_share with:
    output:
        weights=f"{SHARE}/checkpoint/model.safetensors",
        config=f"{SHARE}/checkpoint/config.json",
        training=f"{SHARE}/checkpoint/training.json",
        lines=f"{SHARE}/training.jsonl",
    log:
        f"{LOGS}/train_share/{{share}}.log",
    benchmark:
        f"{BENCHMARKS}/train_share/{{share}}.tsv"
    params:
        recipe=lambda wildcards: share_recipe(CONFIG, wildcards.share.replace("-", "/")),
        rates=RATES,
        folder=subpath(output.weights, parent=True),


use rule estimate_acceptance as estimate_share with:
    input:
        weights=f"{SHARE}/checkpoint/model.safetensors",
        config=f"{SHARE}/checkpoint/config.json",
        rows=expand(TOKENIZED, dataset=DATASETS),
        manifests=expand(MANIFEST, dataset=DATASETS),
        target=TARGET,
    output:
        acceptance=f"{SHARE}/acceptance.json",
    log:
        f"{LOGS}/estimate_share/{{share}}.log",
    benchmark:
        f"{BENCHMARKS}/estimate_share/{{share}}.tsv"


rule fit_scaling:
    input:
        trainings=expand(f"{SHARE}/checkpoint/training.json", share=SHARES) + [TRAINING],
        acceptances=expand(f"{SHARE}/acceptance.json", share=SHARES) + [ACCEPTANCE],
        evaluation=EVALUATION,
        code=code_files("fit_scaling"),
    output:
        scaling=SCALING,
    log:
        f"{LOGS}/fit_scaling.log",
    benchmark:
        f"{BENCHMARKS}/fit_scaling.tsv"
    params:
        recipe=scaling_recipe(CONFIG),
    shell:
        "python scripts/fit_scaling.py --trainings {input.trainings:q} --acceptances {input.acceptances:q}"
        " --evaluation {input.evaluation:q} --recipe {params.recipe:q} --out {output.scaling:q} --log {log:q}"
