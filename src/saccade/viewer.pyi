from .see.viewer import (
    Viewer as Viewer,
    as_json as as_json,
    draw as draw,
    draw_figure as draw_figure,
    render_report as render_report,
    render_steps as render_steps,
    step as step,
    steps_as_text as steps_as_text,
    view as view,
)
