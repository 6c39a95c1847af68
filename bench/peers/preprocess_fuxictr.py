"""Time of FuxiCTR's preprocessing of a Criteo CSV with a header, in seconds on stdout."""

import sys
import tempfile
import time

from fuxictr.preprocess import FeatureProcessor, build_dataset
from fuxictr.preprocess.build_dataset import init_ray

source = sys.argv[1]
dense = [f"I{i}" for i in range(1, 14)]
slots = [f"C{i}" for i in range(1, 27)]
columns = [
    {"name": dense, "active": True, "dtype": "float", "type": "numeric", "normalizer": "MinMaxScaler"},
    {"name": slots, "active": True, "dtype": "str", "type": "categorical"},
]
label = {"name": "label", "dtype": "float"}
init_ray()  # starting Ray is not part of the preprocessing
with tempfile.TemporaryDirectory() as folder:
    began = time.perf_counter()
    encoder = FeatureProcessor(feature_cols=columns, label_col=label, dataset_id="criteo", data_root=folder)
    build_dataset(encoder, train_data=source, min_categr_count=1)
    print(time.perf_counter() - began)
