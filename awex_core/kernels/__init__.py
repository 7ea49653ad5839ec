"""Copy programs on GPUs: one kernel launch moves, or digests, all of a program's descriptors.

``tiles`` turns descriptors into tables of small pieces of equal work; that is plain arithmetic and is tested on CPUs.
``gpu`` holds the kernels (Triton) that work through such tables, and is imported where weights lie on a GPU. ``pace``
says how much of it they take: all, or little beside a model.
"""
