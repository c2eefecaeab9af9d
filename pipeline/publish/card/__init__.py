"""The card of a published checkpoint: README.md with metadata that the Hub reads, and scores beside it."""

from pipeline.publish.card.facts import CardFacts as CardFacts
