"""The k layers whose gradients are longest in a private mean train, and a fresh head."""

import torch

from dpft.gradients import Partition, gradients
from dpft.method import Method, Request, fresh_head


class PrivateNorms(Method):
    def __init__(self, k=2, sample_rate=0.2, share=0.1, bound=1.0):
        self.k, self.sample_rate, self.share, self.bound = k, sample_rate, share, bound

    def requests(self, context):
        return [Request(self.sample_rate, 1, self.share, "norms")]

    def choose(self, context, among):
        layers = self.layers(context, among)
        context.train_only(among)
        means = self.means(context, layers)
        self._chosen = [layers[i].name for i in means.argsort(descending=True)[:self.k]]
        return self.chosen(layers)

    def means(self, context, layers):
        total = torch.zeros(len(layers), device=layers[0].parameters[0].device)
        for batch in context.draw(self.sample_rate):
            taken = gradients(context.model, context.loss_fn, batch, context.groups(batch))
            norms = taken.norms(2, layers)
            whole = norms.norm(dim=1, keepdim=True)
            bounded = norms * (self.bound / whole).clamp(max=1)
            total += torch.where(whole.isfinite(), bounded, 0).sum(0)
        return context.release(total, self.bound) / (self.sample_rate * context.size)

    def layers(self, context, among):
        own = {id(parameter) for parameter in among}
        found = [(name, tuple(p for p in layer.parameters(recurse=False) if id(p) in own))
                 for name, layer in context.model.named_modules()]
        return [Partition(name, inside) for name, inside in found if inside]

    def chosen(self, layers):
        return [p for layer in layers if layer.name in self._chosen for p in layer.parameters]

    def state(self, context):
        return self._chosen

    def restore(self, context, state):
        self._chosen = state
        context.already_released(1)
        own = self.chosen(self.layers(context, context.body))
        context.train_only([*own, *fresh_head(context.model)])
