"""The stages of a run, in the order in which they run: adding one is its module and a line here."""

from __future__ import annotations

from typing import Final

from quantmint.pipeline.stages.acceptance import AcceptanceStage
from quantmint.pipeline.stages.bench import BenchStage
from quantmint.pipeline.stages.calibrate import CalibrateStage
from quantmint.pipeline.stages.canary import CanaryStage
from quantmint.pipeline.stages.draft import DraftStage
from quantmint.pipeline.stages.evaluate import ControlStage, EvaluateStage
from quantmint.pipeline.stages.gate import GateStage
from quantmint.pipeline.stages.inspect import InspectStage
from quantmint.pipeline.stages.kl import KlStage
from quantmint.pipeline.stages.layout import LayoutStage
from quantmint.pipeline.stages.long_context import LongContextStage
from quantmint.pipeline.stages.package import PackageStage, SignStage
from quantmint.pipeline.stages.publish import PublishStage
from quantmint.pipeline.stages.quantize import QuantizeStage
from quantmint.pipeline.stages.reasoning import ReasoningStage
from quantmint.pipeline.stages.report import ReportStage
from quantmint.pipeline.stages.sensitivity import SensitivityStage
from quantmint.pipeline.stages.serve import ServeStage
from quantmint.pipeline.stages.source import SourceStage
from quantmint.pipeline.stages.stage import Stage
from quantmint.pipeline.stages.tool_calls import ToolCallsStage

STAGES: Final[tuple[Stage, ...]] = (
    SourceStage(),
    SensitivityStage(),
    CalibrateStage(),
    QuantizeStage(),
    InspectStage(),
    DraftStage(),
    ServeStage("baseline"),
    CanaryStage("baseline"),
    KlStage("baseline"),
    AcceptanceStage("baseline"),
    ServeStage("candidate"),
    CanaryStage("candidate"),
    KlStage("candidate"),
    AcceptanceStage("candidate"),
    LayoutStage(),
    EvaluateStage("baseline"),
    ControlStage(),
    ToolCallsStage("baseline"),
    LongContextStage("baseline"),
    ReasoningStage("baseline"),
    EvaluateStage("candidate"),
    ToolCallsStage("candidate"),
    LongContextStage("candidate"),
    ReasoningStage("candidate"),
    BenchStage(),
    GateStage(),
    ReportStage(),
    PackageStage(),
    SignStage(),
    PublishStage(),
)
"""The baseline comes first, because everything about the candidate is judged beside it: the canary's answers, and a
sequential evaluation that stops as soon as the two are told apart. The baseline's stages have nothing of the candidate
in their fingerprints, so all recipes of a model share them. The canary comes before all that takes long. Servers are
started in the order B, C, B, C, one at a time, as there may be no room for two; a CPU that has the room keeps both.
Where the baseline is known already, only the candidate's is started."""
