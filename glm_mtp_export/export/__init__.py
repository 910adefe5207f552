"""Export a checkpoint as one step graph with its weight plan and manifest."""

from glm_mtp_export.export.exporter import ExportOptions, export_checkpoint

__all__ = ["ExportOptions", "export_checkpoint"]
