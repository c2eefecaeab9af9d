"""A word-level tokenizer that can still spell anything: whole words of the world, single bytes for the rest.

It is byte-level BPE with no merges at all. ``ignore_merges`` looks a word up before it is split, so a word of the world
is one token (an answer costs one forward step to score) and any other text falls apart into bytes instead of unknowns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
PAD = "<|pad|>"


def build_tokenizer(vocabulary: list[str], max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer of these words. Nothing is added to a text, neither a start nor an end.

    Every word is stored with its leading space, and a text's first word is given one, so a word has one form only.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = [END, PAD, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġ{word}" for word in vocabulary)]
    tokenizer = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(PAD, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
