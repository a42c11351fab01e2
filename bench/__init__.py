"""Speed, memory and error of tree attention next to its peers: `python -m bench --help`.

Every figure is of one run on one machine. Implementations take turns within each round, because a
GPU's clock drifts, and ratios are taken within a round; an implementation whose numbers do not
agree with a float64 oracle gets no time.
"""
