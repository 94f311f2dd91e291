"""What is kept of each iteration for people and their tools: figures, histograms, samples, other trackers.

Lives here: the files of these, TensorBoard and Weights & Biases behind one protocol.
Must not live here: how a figure is computed from a stage's records (`cluster.reporting`).
"""
