"""Ray on Kubernetes by KubeRay: manifests that follow from a config's placement and memory plan.

Lives here: the pods of each pool, manifests written from them and compared with them, examples by kustomize.
Must not live here: what needs a Kubernetes cluster, secrets, Ray's own placement (`cluster.placement`).
"""
