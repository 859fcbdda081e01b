"""Steps under torch.compile that others measured, beside what is predicted: ``python -m benchmarks.accuracy_fused``.

The cases are those of the authors of NeuSight with ``torch.compile(model)``, each beside the eager step of the same
shape; `benchmarks.measured_step` says where they are from. Nothing is fitted to them.
"""
from __future__ import annotations

from statistics import median

from analyzer.record.options import ProfileOptions
from analyzer.report.node_table import print_rows
from benchmarks.measured_step import neusight_steps

COLUMNS = ("Case", "Compiled, measured", "Predicted", "Error", "NeuSight's", "Compiled / eager, measured", "Predicted",
           "Kernels")


def main() -> None:
    """Print the table and the median errors."""
    eager = {step.id: step for step in neusight_steps()}
    rows, errors, ratios = [], [], []
    for step in neusight_steps("fusion"):
        plain = eager[step.id.replace("-fusion", "")]
        profile = plain.profile(options=ProfileOptions(fused="default"))
        fused = profile.fused
        assert fused is not None and profile.step_seconds is not None
        error = fused.step_seconds / step.seconds - 1
        measured, predicted = step.seconds / plain.seconds, fused.step_seconds / profile.step_seconds
        errors.append(abs(error))
        ratios.append(abs(predicted / measured - 1))
        rows.append((step.id, f"{step.seconds * 1e3:.1f} ms", f"{fused.step_seconds * 1e3:.1f} ms", f"{error:+.1%}",
                     f"{step.others['neusight'] / step.seconds - 1:+.1%}", f"{measured:.3f}", f"{predicted:.3f}",
                     f"{fused.eager_kernels} to {fused.kernels}"))
    print(print_rows(COLUMNS, rows))
    print(f"\nmedian error: {median(errors):.1%} of the time, {median(ratios):.1%} of the ratio to eager")


if __name__ == "__main__":
    main()
