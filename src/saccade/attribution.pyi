from .see.attribution import (
    Attribution as Attribution,
    CallHeads as CallHeads,
    HeadImportance as HeadImportance,
    HeadValues as HeadValues,
    Patching as Patching,
    WhyAttends as WhyAttends,
    attribute as attribute,
    head_importance as head_importance,
    patching as patching,
    why_attends as why_attends,
)
