"""Probability, differential equations, graphs, geometry, Bayesian optimisation."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from tests.integrations.programs import program, seeded, trained


def network(*widths: int, device: str = "cpu", activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Return linear layers of these widths with the weights of a seed."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for left, right in itertools.pairwise(widths):
        layers += [nn.Linear(left, right), activation()]
    return nn.Sequential(*layers[:-1]).to(device)


@program("gpytorch", "an exact GP with an RBF kernel: five steps, predictions with variances", 1e-3)
def gpytorch_exact(device: str) -> Any:
    import gpytorch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, x: torch.Tensor, y: torch.Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = torch.linspace(0, 1, 20).to(device)
    y = torch.sin(6 * x)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(device)
    model = Model(x, y, likelihood).to(device)
    model.train()
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    losses = trained(model, lambda: -evidence(model(x), y), steps=5)
    model.eval()
    likelihood.eval()
    with torch.no_grad():
        predicted = likelihood(model(torch.linspace(0, 1, 7).to(device)))
    return losses, predicted.mean, predicted.variance


@program("botorch", "SingleTaskGP, analytic and Monte Carlo acquisition with gradients", 1e-3)
def botorch_acquisition(device: str) -> Any:
    from botorch.acquisition import ExpectedImprovement, qExpectedImprovement
    from botorch.models import SingleTaskGP
    from botorch.sampling import SobolQMCNormalSampler

    x = seeded(10, 2).sigmoid().double().to(device)
    model = SingleTaskGP(x, x.sum(-1, keepdim=True).sin())
    points = seeded(5, 1, 2).sigmoid().double().to(device).requires_grad_()
    value = ExpectedImprovement(model, best_f=0.2)(points)
    sampler = SobolQMCNormalSampler(torch.Size([16]), seed=0)
    many = qExpectedImprovement(model, best_f=0.2, sampler=sampler)(points.detach().reshape(1, 5, 2))
    value.sum().backward()
    return value, many, points.grad


@program("pyro-ppl", "SVI of a normal model, ELBO of given draws; log densities")
def pyro_svi(device: str) -> Any:
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, TraceMeanField_ELBO
    from pyro.infer.autoguide import AutoDelta

    data = seeded(20).to(device) + 2

    def model(values: torch.Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(torch.zeros((), device=device), 5.0))
        with pyro.plate("data", len(values)):
            pyro.sample("value", dist.Normal(mean, 1.0), obs=values)

    pyro.clear_param_store()
    guide = AutoDelta(model, init_loc_fn=lambda site: torch.zeros((), device=device))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), TraceMeanField_ELBO())
    losses = [svi.step(data) for _ in range(5)]
    shapes = dist.Gamma(torch.tensor(2.0, device=device), 1.0).log_prob(data.abs())
    return torch.tensor(losses, device=device), pyro.param("AutoDelta.mean"), shapes


@program("torchdiffeq", "dopri5 and rk4, gradients by the adjoint")
def torchdiffeq_adjoint(device: str) -> Any:
    from torchdiffeq import odeint, odeint_adjoint

    net = network(2, 8, 2, device=device)

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.net(y)

    times = torch.linspace(0, 1, 4).to(device)
    start = seeded(3, 2).to(device)
    out = odeint_adjoint(Field(), start, times, method="dopri5", rtol=1e-5, atol=1e-6)
    out[-1].square().sum().backward()
    return out, net[0].weight.grad, odeint(Field(), start, times, method="rk4")


@program("torchsde", "Euler-Maruyama and its adjoint with the same Brownian path")
def torchsde_adjoint(device: str) -> Any:
    import torchsde

    class Equation(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Parameter(torch.tensor(0.5))

        def f(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return -self.rate * y

        def g(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return 0.0 * y  # devices draw different numbers; the path below is drawn all the same

    equation = Equation().to(device)
    times = torch.linspace(0, 1, 3).to(device)
    motion = torchsde.BrownianInterval(0.0, 1.0, size=(4, 2), device=device, entropy=1)
    out = torchsde.sdeint_adjoint(equation, seeded(4, 2).to(device), times, bm=motion, dt=0.1, method="euler")
    out[-1].sum().backward()
    return out, equation.rate.grad


@program("torchcde", "a neural controlled differential equation on cubic splines")
def torchcde_spline(device: str) -> Any:
    import torchcde

    net = network(3, 6, device=device)

    class Field(nn.Module):
        def forward(self, t: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return net(z).tanh().reshape(2, 3, 2)

    path = seeded(2, 6, 2).to(device)
    spline = torchcde.CubicSpline(torchcde.natural_cubic_coeffs(path))
    return torchcde.cdeint(
        spline, Field(), seeded(2, 3).to(device), spline.interval, method="rk4", options={"step_size": 0.5}
    )


@program("e3nn", "spherical harmonics, a tensor product and its gradient, Wigner D")
def e3nn_products(device: str) -> Any:
    from e3nn import o3

    torch.manual_seed(0)
    product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", "3x0e + 2x1o").to(device)
    x = seeded(5, 10).to(device).requires_grad_()
    harmonics = o3.spherical_harmonics([0, 1], seeded(5, 3).to(device), normalize=True)
    out = product(x, harmonics)
    out.square().sum().backward()
    return harmonics, out, x.grad


def graph(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features of eight nodes and edges between them."""
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 3], [1, 2, 3, 4, 5, 6, 7, 0, 4, 6]])
    return seeded(8, 6).to(device), edges.to(device)


@program("torch_geometric", "GCN, GAT, GIN and SAGE layers trained, pooling")
def geometric_layers(device: str) -> Any:
    import torch_geometric.nn as gnn

    x, edges = graph(device)
    results = []
    for kind in (gnn.GCNConv, gnn.GATConv, gnn.SAGEConv, lambda a, b: gnn.GINConv(nn.Linear(a, b))):
        torch.manual_seed(0)
        first, second = kind(6, 8), kind(8, 3)
        model = nn.ModuleList([first, second]).to(device)
        loss = lambda a=first, b=second: b(a(x, edges).relu(), edges).square().mean()  # noqa: E731
        results += trained(model, loss)
    batch = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]).to(device)
    return results, gnn.global_mean_pool(x, batch), gnn.global_max_pool(x, batch)


@program("torch_geometric", "a batch of graphs by DataLoader, dense adjacency, k-hop subgraph")
def geometric_data(device: str) -> Any:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.utils import k_hop_subgraph, to_dense_adj

    x, edges = graph("cpu")
    loader = DataLoader([Data(x=x, edge_index=edges), Data(x=x + 1, edge_index=edges)], batch_size=2)
    batch = next(iter(loader)).to(device)
    nodes, _, _, _ = k_hop_subgraph(0, 2, batch.edge_index)
    return batch.x, to_dense_adj(batch.edge_index, batch.batch), nodes


@program("torch_geometric", "a layer with a sparse adjacency (torch.sparse_coo)")
def geometric_sparse(device: str) -> Any:
    import torch_geometric.nn as gnn

    x, edges = graph("cpu")
    torch.manual_seed(0)
    layer = gnn.SAGEConv(6, 3).to(device)
    adjacency = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (8, 8)).to(device)
    return layer(x.to(device), adjacency.t())


@program("zuko", "a neural spline flow: log densities and gradients")
def zuko_flow(device: str) -> Any:
    import zuko

    torch.manual_seed(0)
    flow = zuko.flows.NSF(3, context=2, transforms=2, hidden_features=(16,)).to(device)
    value = flow(seeded(5, 2).to(device)).log_prob(seeded(5, 3).to(device))
    value.mean().backward()
    return value, next(flow.parameters()).grad


@program("nflows", "a masked autoregressive flow")
def nflows_flow(device: str) -> Any:
    from nflows import distributions, flows, transforms

    torch.manual_seed(0)
    chain = transforms.CompositeTransform(
        [transforms.MaskedAffineAutoregressiveTransform(3, 8), transforms.ReversePermutation(3)]
    )
    flow = flows.Flow(chain, distributions.StandardNormal([3])).to(device)
    value = flow.log_prob(seeded(5, 3).to(device))
    value.mean().backward()
    return value, next(flow.parameters()).grad


@program("normflows", "Real NVP: log densities")
def normflows_flow(device: str) -> Any:
    import normflows as nf

    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(2)
        for layer in (nf.flows.AffineCouplingBlock(nf.nets.MLP([1, 8, 2])), nf.flows.Permute(2, mode="swap"))
    ]
    flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(2), layers).to(device)
    return flow.log_prob(seeded(6, 2).to(device))


@program("geoopt", "Riemannian Adam on a Poincaré ball and a Stiefel manifold")
def geoopt_adam(device: str) -> Any:
    import geoopt

    ball = geoopt.PoincareBall()
    point = geoopt.ManifoldParameter((seeded(4, 3) * 0.1).to(device), manifold=ball)
    goal = (seeded(3, 4).T * 0.1).contiguous().to(device)
    optimizer = geoopt.optim.RiemannianAdam([point], lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = ball.dist(point, goal).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, point, geoopt.Stiefel().projx(seeded(5, 3).to(device))


@program("laplace-torch", "a Kronecker Laplace approximation of the last layer", 1e-3)
def laplace_last_layer(device: str) -> Any:
    from laplace import Laplace

    model = network(2, 8, 1, device=device)
    loader = torch.utils.data.DataLoader(
        [(x.to(device), x.sum().reshape(1).to(device)) for x in seeded(12, 2)], batch_size=6
    )
    approximation = Laplace(model, "regression", subset_of_weights="last_layer", hessian_structure="kron")
    approximation.fit(loader)
    return approximation(seeded(3, 2).to(device))


@program("neuraloperator", "FNO and its gradient", 1e-3)
def neural_operator(device: str) -> Any:
    from neuralop.models import FNO

    torch.manual_seed(0)
    model = FNO(n_modes=(4, 4), hidden_channels=8, in_channels=1, out_channels=1, n_layers=2).to(device)
    out = model(seeded(2, 1, 16, 16).to(device))
    out.square().mean().backward()
    return out, next(model.parameters()).grad


@program("pykeops", "Gaussian kernel sums of LazyTensors, their gradients, nearest points, a solve")
def pykeops_lazy(device: str) -> Any:
    from pykeops.torch import LazyTensor

    x, y = seeded(6, 3).to(device).requires_grad_(), seeded(5, 3).to(device)
    distances = ((LazyTensor(x[:, None, :]) - LazyTensor(y[None, :, :])) ** 2).sum(-1)
    sums = (-distances).exp().sum(1)
    sums.square().sum().backward()
    points = x.detach()
    kernel = (-((LazyTensor(points[:, None, :]) - LazyTensor(points[None, :, :])) ** 2).sum(-1)).exp()
    return sums, x.grad, distances.argKmin(2, dim=1), kernel.solve(seeded(6, 1).to(device), alpha=0.1)


@program("linear-operator", "solves and log determinants of structured matrices", 1e-3)
def linear_operators(device: str) -> Any:
    import linear_operator as lo

    root = seeded(6, 6).to(device)
    matrix = lo.to_linear_operator(root @ root.T + 6 * torch.eye(6, device=device)).add_jitter(0.1)
    right = seeded(6, 2).to(device)
    kronecker = lo.operators.KroneckerProductLinearOperator(
        lo.to_linear_operator(root[:2, :2]), lo.to_linear_operator(root[:3, :3])
    )
    return matrix.solve(right), matrix.logdet(), kronecker.matmul(right)
