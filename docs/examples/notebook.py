# A notebook as a script: each `# %%` is a cell (VS Code, PyCharm, Jupyter with jupytext). Run it in an empty folder.
# At a prompt and in a notebook every call tells its progress by itself; in a program it is silent.

# %% Synthetic logs whose true click probabilities are known, in place of yours
from pathlib import Path

import clickline
from clickline.data.sample.generate import SampleOptions, generate
from clickline.progress import Progress

sample = generate(SampleOptions(format="csv", rows=50_000, out=Path("data"), slots=6, dense=2), Progress())
print(f"best achievable AUC {sample.best_auc:.3f}")

# %% One config for everything
Path("clickline.yaml").write_text(
    """
name: ads
data:
  format: csv
  train: data/train.csv
  eval: data/eval.csv
  fields:
    {click: label, timestamp: time, I1: log1p, I2: log1p, C1: slot, C2: slot, C3: slot, C4: slot, C5: slot, C6: slot}
model: {embedding_dim: 8, hidden: [64, 32]}
gate: {auc: 0.6}
"""
)
config = clickline.load_config("clickline.yaml")

# %% Stage by stage: each call returns what it made
prepared = clickline.prepare(config)
print(f"{prepared.train_rows:,} rows to learn, {prepared.bad_rows} bad, in {prepared.dataset.folder}")

# %%
trained = clickline.train(config)
print(f"AUC {trained.evaluation.total.auc:.3f}, the gate: {trained.verdict.passed}")

# %% What a field is worth: the AUC that is lost when it is shuffled
evaluated = clickline.evaluate(config, importance=True)
for field in evaluated.importance[:3]:
    print(f"{field.name}: {field.lost:.4f}")

# %% An error says what was found, what is allowed and what to do
try:
    clickline.train(clickline.load_config("clickline.yaml", ["gate.auc=0.99", "gate.extra_epochs=0"]))
except clickline.ClicklineError as error:
    print(error)

# %% The whole flow; what is done already is skipped. The endpoint runs in processes of its own until the block ends
with clickline.up(config) as running:
    print(f"skipped: {', '.join(running.skipped)}; version {running.version} at {running.endpoint.http}")
    with clickline.Client(running.endpoint.grpc) as client:
        print(client.predict([{"I1": 3, "C1": "a"}, {"I1": 0, "C1": "b"}]).probability)
