"""From text to batches.

build       prepare: text -> tokenizer -> shards, cached
dataset     open_dataset: a prepared data set, checked
sampler     Sampler: the batch of a step; loader: Loader, which reads ahead
validation  iterate_valid: every held-out token once
"""
