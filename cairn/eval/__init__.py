"""Evaluation of models: perplexity of files, multiple choice, exact match, each with a confidence interval.

    tasks -> requests (loglikelihood, rolling, generate_until) -> a model -> results -> scores

The three kinds of request are those that lm-eval defines, so that scores can be compared with published ones.
"""
