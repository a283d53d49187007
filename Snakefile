"""Eyrie: from raw chat datasets to an evaluated EAGLE-3 drafter.

Named targets: all, prompts, responses, hidden_states, drafter, evaluation, report,
serving, scaling, and each dataset's name.
`snakemake --cores all` builds config.yaml; another build is `--configfile configs/NAME.yaml`, which stands
for itself and is not laid over config.yaml.
"""

from snakemake.utils import min_version

min_version("9.0")

if not workflow.overwrite_configfiles:

    configfile: "config.yaml"


report: "report/workflow.rst"


include: "rules/common.smk"
include: "rules/prompts.smk"
include: "rules/responses.smk"
include: "rules/hidden_states.smk"
include: "rules/drafter.smk"
include: "rules/evaluation.smk"
include: "rules/report.smk"
include: "rules/scaling.smk"
include: "rules/serving.smk"


rule all:
    default_target: True
    input:
        CHECKPOINT,
        ACCEPTANCE,
        CARD,
        REPORT,


rule prompts:
    input:
        [conversation_rows(dataset) for dataset in DATASETS],
        SELECTION,


rule responses:
    input:
        expand(TOKENIZED, dataset=DATASETS),


rule hidden_states:
    input:
        expand(MANIFEST, dataset=DATASETS),
