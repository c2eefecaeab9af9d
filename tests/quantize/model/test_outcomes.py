"""What is said of a source that is quantized already: before a run, and of its checkpoint."""

from __future__ import annotations

import math

from quantmint.calibration.encodings import Encoded
from quantmint.pipeline.quantize.model.outcomes import outcome_forecast, outcome_note

MXFP4 = {"a.weight": Encoded("mxfp4", ("a.weight_scale",)), "b.weight": Encoded("mxfp4", ("b.weight_scale",))}


def test_modules_are_counted_by_what_became_of_them() -> None:
    assert outcome_note({}, [30.0]) is None
    assert outcome_note(MXFP4, [None, math.inf]) == (
        "The source is quantized already, in MXFP4: 2 of the 2 quantized modules hold its very numbers, and 0 were "
        "rounded again."
    )
    both = outcome_note({**MXFP4, "c.weight": Encoded("int4", ())}, [None, 31.26, 24.04])
    assert both is not None
    assert "in INT4 and MXFP4: 1 of the 3" in both
    assert both.endswith("2 were rounded again, with a least SQNR of 24.0 dB against the decoded source.")


def test_what_will_become_of_them_is_said_before() -> None:
    assert outcome_forecast({}, ["mxfp4"]) is None
    assert outcome_forecast(MXFP4, ["mxfp4", "ptpc_fp8", "int8_w8a8"]) == (
        "the source is quantized already, and decoded where it is read: weights in MXFP4 keep their bytes in mxfp4; "
        "weights in MXFP4 keep their numbers where the exponents behind a scale span 14 binades, and are rounded again "
        "elsewhere in ptpc_fp8; weights in MXFP4 are rounded again in int8_w8a8"
    )
