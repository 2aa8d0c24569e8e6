"""The stage table, in the order of the chain. One row is one artifact."""

from hyco_export.stages.build_keepset import STAGE as BUILD_KEEPSET
from hyco_export.stages.capture import STAGE as CAPTURE
from hyco_export.stages.compile import STAGE as COMPILE
from hyco_export.stages.convert_head import STAGE as CONVERT_HEAD
from hyco_export.stages.convert_slm import STAGE as CONVERT_SLM
from hyco_export.stages.qat_head import STAGE as QAT_HEAD

STAGES = (CAPTURE, QAT_HEAD, BUILD_KEEPSET, CONVERT_HEAD, CONVERT_SLM, COMPILE)
