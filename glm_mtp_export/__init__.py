"""Export GLM-5.2 multi-token-prediction decoding as one ONNX graph, build engines from it, and run them."""

__version__ = "0.1.0"
