"""The card of a published checkpoint: README.md with metadata that the Hub reads, and scores beside it.

facts = gather(job)                     # pipeline.publish.card.gathering
text, scores = render(facts), eval_results(facts)
"""

from pipeline.publish.card.eval_results import eval_results as eval_results
from pipeline.publish.card.facts import CardFacts as CardFacts
from pipeline.publish.card.rendering import notice as notice
from pipeline.publish.card.rendering import render as render
from pipeline.publish.card.rendering import sentence as sentence
