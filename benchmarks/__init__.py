"""Figures with goals: ``python -m benchmarks [NAME ...]``. Not shipped.

models          shapes of named models, and their layouts on trainers and engines; no weights
pieces          real memory behind a layout, and pairs of layouts with a planned program
processes       two processes that meet, with a time limit
report          figures, goals, tables, result files
bench_*         one module per benchmark; each has a ``run()``
gpu             those of GPUs: ``python -m benchmarks.gpu`` runs all that there is time for
plot            draws where the time of an update goes, from the result files
"""
