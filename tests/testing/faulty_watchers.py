"""Callbacks, optimizers and metrics with one fault each, as the text of a module."""

SOURCE = '''
class Looker(Callback):
    """Look on, with a fault."""
    name = "faulty.looker"
    fault = ""

    def on_start(self, start):
        self.ids, self.last = 0, [0] * (self.fault != "needs_a_step")

        self.rank = start.rank

    def on_batch(self, batch):
        self.ids += len(batch.ids("user"))
        if self.fault == "wants_a_row_for_each_label":
            batch.batch.labels * batch.batch.sequence_features["history"].lengths()
        if self.fault == "changes_a_batch":
            batch.ids("history").zero_()

    def on_step(self, step):
        self.last.append(step.step)
        if self.fault == "changes_a_loss":
            step.loss.mul_(2)

    def on_end(self, end):
        self.last.pop()

    def state_dict(self):
        if self.fault == "keeps_tensors":
            return {"ids": torch.tensor(self.ids)}
        if self.fault == "says_late_what_it_counts" and self.last[-1] < 4:
            return {}
        return {"ids": self.ids}

    def load_state_dict(self, states):
        if self.fault == "takes_one_rank":
            (state,) = states
        if self.fault == "takes_its_rank":
            state = states[self.rank]
        if self.fault == "adds_up_at_each_rank":
            self.ids = sum(state["ids"] for state in states)
            return
        if self.fault == "loads_nothing":
            return super().load_state_dict(states)
        if self.fault != "forgets":
            self.ids = states[0]["ids"]


class Stepper(Optimizer):
    """SGD."""
    name = "test.stepper"
    fault = ""
    calls = 0
    def update(self, table):
        self.calls += 1
        arguments = {"lr": 0.1}
        if self.fault == "has_momentum":
            arguments["momentum"] = 0.9
        if self.fault == "has_no_rate":
            arguments = {"rate": 0.1}
        if self.fault == "draws_rates":
            arguments["lr"] = float(torch.rand(()))
        if self.fault == "counts_calls":
            arguments["lr"] = 0.1 * self.calls
        if self.fault == "stands_still":
            arguments["lr"] = 0.0
        if self.fault == "gives_a_dict":
            return arguments
        if self.fault == "is_unknown":
            return RowUpdate(torch.optim.Adamax, arguments)
        return RowUpdate(torch.optim.SGD, arguments)


class MeanLabel(Metric):
    """The mean label."""
    name = "test.mean_label"
    fault = ""
    def start(self):
        self.total = 0.0
        return [] if self.fault == "needs_samples" else [(0.0, 0)]
    def update(self, state, batch):
        if self.fault == "works_in_place":
            batch.labels.zero_()
        if self.fault == "numbers_sessions":
            batch.sessions.add_(1)
        if self.fault == "means_of_batches":
            return [*state, (float(batch.labels.double().mean()), 1)]
        self.total += float(batch.labels.sum())
        if self.fault == "stays":
            return [*state, (float(batch.labels.sum()), len(batch.labels)), lambda: 0]
        return [*state, (float(batch.labels.sum()), len(batch.labels))]
    def results(self, states):
        if self.fault == "gives_nothing":
            return {}
        if self.fault == "needs_samples":
            states = [state for state in states if max(state)]
        if self.fault == "takes_the_last_rank":
            states = states[-1:]
        if self.fault == "stays":
            states = [[each for each in state if isinstance(each, tuple)] for state in states]
        sums = [(sum(x for x, _ in state), sum(n for _, n in state)) for state in states]
        if self.fault == "means_of_ranks":
            means = [x / n for x, n in sums if n]
            return {"mean_label": sum(means) / len(means)}
        total, seen = map(sum, zip(*sums))
        if self.fault == "keeps_to_itself":
            total = self.total
        if self.fault == "needs_both_labels":
            return {"odds": total / seen / (1 - total / seen)}
        name = "mean label" if self.fault == "has_a_title" else "mean_label"
        found = {"gives_nan": float("nan"), "gives_tensors": torch.tensor(0.5)}
        return {name: found.get(self.fault, total / seen)}
'''
