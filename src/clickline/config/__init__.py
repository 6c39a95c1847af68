"""clickline.yaml: its sections, and how it is read and checked."""

from clickline.config.loader import json_schema, load_config, resolved
from clickline.config.sections import Config, DataSection, Dates, FieldConfig

__all__ = ["Config", "DataSection", "Dates", "FieldConfig", "json_schema", "load_config", "resolved"]
