"""Attention of other runtimes for CPUs, float32 forward: ONNX Runtime and OpenVINO (`pip install "onnx>=1.17"
"onnxruntime>=1.23" "openvino>=2024.3"`).

Both read the case's tensors and write into one that is made before the clock starts, without copies, on as many threads
as PyTorch has at that time.

Shape legend: B batch, Hq / Hkv heads, Lq / Lk lengths, D and Dv widths.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from saccade.benchmark.attention.cases import Case, CaseInputs
from saccade.benchmark.attention.contenders import Contender, Forward, SdpaAttention, constrains, dense_scores


class _Runtime(Contender):
    def needs(self, case: Case) -> int:
        return SdpaAttention().needs(case)

    @staticmethod
    def modules(*names: str) -> list[Any]:
        """ImportError that reads as a table's note."""
        try:
            return [importlib.import_module(name) for name in names]
        except ImportError as error:
            raise ImportError(f"not installed ({error.name})") from None

    @staticmethod
    def operands(inputs: CaseInputs) -> tuple[list[Tensor], bool]:
        """query, key, value and, where the mask is not causality of a square, a dense mask; and whether it is causal.

        ValueError where there is no kernel for the case.
        """
        case = inputs.case
        if case.dtype != "float32":
            raise ValueError("its attention is float32 here")
        if case.records:
            raise ValueError("it has no backward")
        causal = SdpaAttention.takes_causal(case)
        mask = None if causal or not constrains(case) else dense_scores(inputs)
        return [*inputs.leaves, *([] if mask is None else [mask])], causal


class OnnxRuntimeAttention(_Runtime):
    """ONNX Runtime: com.microsoft.MultiHeadAttention where every key is seen, else the standard's Attention (opset 23).

    The first is the faster of the two without a mask (its flash kernel), and has neither causality nor grouped heads.
    Threads do not spin between calls, which would take the others' cores.
    """

    name = "ONNX Runtime"

    def forward(self, inputs: CaseInputs) -> Forward:
        onnx, runtime = self.modules("onnx", "onnxruntime")
        tensors, causal = self.operands(inputs)
        case = inputs.case
        shape: tuple[int, ...] = (case.batch, case.heads, case.length_q, case.value_width)
        rows = len(tensors) == 3 and not causal and case.heads == case.kv_heads
        if rows:  # (B, L, H D): each head's columns side by side
            tensors = [one.transpose(1, 2).flatten(2).contiguous() for one in tensors]
            shape = (case.batch, case.length_q, case.heads * case.value_width)
        out = torch.empty(shape)
        names = ["query", "key", "value", "mask"][: len(tensors)]
        node = (
            onnx.helper.make_node("MultiHeadAttention", names, ["out"], domain="com.microsoft", num_heads=case.heads)
            if rows
            else onnx.helper.make_node("Attention", names, ["out"], is_causal=int(causal))
        )
        kinds = {torch.float32: onnx.TensorProto.FLOAT, torch.bool: onnx.TensorProto.BOOL}
        described = [
            onnx.helper.make_tensor_value_info(name, kinds[one.dtype], one.shape)
            for name, one in [*zip(names, tensors, strict=True), ("out", out)]
        ]
        graph = onnx.helper.make_graph([node], "attention", described[:-1], described[-1:])
        sets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("com.microsoft", 1)]
        model = onnx.helper.make_model(graph, opset_imports=sets, ir_version=10)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        bound = session.io_binding()
        for name, one in zip(names, tensors, strict=True):
            bound.bind_input(name, "cpu", 0, one.numpy().dtype, tuple(one.shape), one.data_ptr())
        bound.bind_output("out", "cpu", 0, out.numpy().dtype, tuple(out.shape), out.data_ptr())
        made = out.unflatten(2, (case.heads, case.value_width)).transpose(1, 2) if rows else out

        def compute(tensors: list[Tensor] = tensors) -> Tensor:  # a session does not hold the memory it is bound to
            session.run_with_iobinding(bound)
            return made

        return compute


class OpenVinoAttention(_Runtime):
    """OpenVINO's ScaledDotProductAttention (opset 13), held to float32 and one stream."""

    name = "OpenVINO"

    def forward(self, inputs: CaseInputs) -> Forward:
        openvino, operators = self.modules("openvino", "openvino.opset13")
        tensors, causal = self.operands(inputs)
        case = inputs.case
        if case.heads != case.kv_heads:
            raise ValueError("it takes no grouped heads")
        tensors = [one.contiguous() for one in tensors]
        parameters = [operators.parameter(list(one.shape), one.numpy().dtype.type) for one in tensors]
        model = openvino.Model([operators.scaled_dot_product_attention(*parameters, causal=causal)], parameters, "")
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "f32",
            "NUM_STREAMS": 1,
        }
        request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
        out = torch.empty(case.batch, case.heads, case.length_q, case.value_width)
        for place, one in enumerate(tensors):
            request.set_input_tensor(place, openvino.Tensor(one.numpy(), shared_memory=True))
        request.set_output_tensor(0, openvino.Tensor(out.numpy(), shared_memory=True))

        def compute(tensors: list[Tensor] = tensors) -> Tensor:
            request.infer()
            return out

        return compute
