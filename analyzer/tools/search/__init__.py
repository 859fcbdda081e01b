"""Which way to train: layouts of a job over a cluster, ranked by steps that are composed of profiled ranks."""
