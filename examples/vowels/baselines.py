"""Two classifiers without a language model, on the same recordings: the nearest neighbour, and logistic regression."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from .recordings import NUM_SPEAKERS, Recording

REGRESSION_WEIGHT_DECAY = 1e-3
"""Of the squared weights of the regression, in its loss."""


def answer_by_neighbour(train: Sequence[Recording], test: Sequence[Recording]) -> list[str]:
    """Answer with the speaker of the nearest recording for training, by dynamic time warping over all channels.

    The distance is that of Sakoe and Chiba (1978) without a band: the least sum of squared differences of frames along
    a path that goes through both recordings.
    """
    lengths = np.array([len(recording.frames) for recording in train])
    padded = np.zeros((len(train), lengths.max(), train[0].frames.shape[1]))
    for index, recording in enumerate(train):
        padded[index, : lengths[index]] = recording.frames
    answers = []
    for recording in test:
        distances = compute_distances(recording.frames, padded, lengths)
        answers.append(train[int(distances.argmin())].answer)
    return answers


def compute_distances(frames: np.ndarray, padded: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the distance of a recording from each of several others.

    Args:
        frames: the recording (frames, channels).
        padded: the others (recordings, most frames, channels), padded at their ends.
        lengths: the frames of each of the others.
    """
    differences = frames[None, :, None, :] - padded[:, None, :, :]
    costs = np.square(differences).sum(3)  # (recordings, frames, most frames)
    _, num_rows, num_columns = costs.shape
    paths = np.full((len(padded), num_rows + 1, num_columns + 1), np.inf)
    paths[:, 0, 0] = 0.0
    for row in range(num_rows):
        for column in range(num_columns):
            before = paths[:, row : row + 2, column : column + 2].reshape(len(padded), 4)
            # of the four cells, the last is the one that is computed here, and still infinite
            paths[:, row + 1, column + 1] = costs[:, row, column] + before.min(1)
    # a path of a shorter recording ends before its padding
    distances: np.ndarray = paths[np.arange(len(padded)), num_rows, lengths]
    return distances


def answer_by_regression(train: Sequence[Recording], test: Sequence[Recording]) -> list[str]:
    """Answer by logistic regression on mean, deviation and mean absolute difference of each channel."""
    features = torch.stack([summarise(recording.frames) for recording in train])
    means = features.mean(0)
    deviations = features.std(0)
    labels = torch.tensor([recording.speaker - 1 for recording in train])
    regression = nn.Linear(features.shape[1], NUM_SPEAKERS)
    nn.init.zeros_(regression.weight)
    nn.init.zeros_(regression.bias)
    optimizer = torch.optim.LBFGS(regression.parameters(), max_iter=500, line_search_fn="strong_wolfe")

    def compute_loss() -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(regression((features - means) / deviations), labels)
        loss = loss + REGRESSION_WEIGHT_DECAY * regression.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(compute_loss)
    test_features = torch.stack([summarise(recording.frames) for recording in test])
    scores = regression((test_features - means) / deviations)
    return [f"speaker {index + 1}" for index in scores.argmax(1).tolist()]


def summarise(frames: np.ndarray) -> torch.Tensor:
    """Return mean, deviation and mean absolute difference of neighbours, of each channel (channels * 3)."""
    parts = [frames.mean(0), frames.std(0), np.abs(np.diff(frames, axis=0)).mean(0)]
    return torch.from_numpy(np.concatenate(parts))
