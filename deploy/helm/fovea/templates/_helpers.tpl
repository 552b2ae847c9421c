{{/* Names, labels and checks. `with` arguments are (list $ "component"). */}}

{{- define "fovea.fullname" -}}
{{- $default := ternary .Release.Name (printf "%s-fovea" .Release.Name) (contains "fovea" .Release.Name) -}}
{{- /* A stateful set's name has at most 52 characters. */ -}}
{{- .Values.fullnameOverride | default $default | trunc 37 | trimSuffix "-" -}}
{{- end }}

{{- define "fovea.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: fovea
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "fovea.labels" -}}
{{- $root := index . 0 -}}
{{ include "fovea.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{- /* The content of an object's metadata: (list $ component suffix). The suffix is appended to the full name. */ -}}
{{- define "fovea.meta" -}}
{{- $root := index . 0 -}}
name: {{ include "fovea.fullname" $root }}-{{ index . 2 }}
labels: {{- include "fovea.labels" . | nindent 2 }}
{{- end }}

{{- /* The name of a volume's claim; empty for an emptyDir: (list $ volume suffix). */ -}}
{{- define "fovea.claim" -}}
{{- $volume := index . 1 -}}
{{- if $volume.claim }}{{ $volume.claim }}
{{- else if $volume.size }}{{ include "fovea.fullname" (index . 0) }}-{{ index . 2 }}
{{- end }}
{{- end }}

{{- /* A text for a generated secret, by secretSeed or by chance: (list $ secret-suffix). */ -}}
{{- define "fovea.secretText" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.secretSeed -}}
{{ printf "%s/%s/%s/%s" $root.Values.secretSeed $root.Release.Namespace (include "fovea.fullname" $root) (index . 1) | sha256sum | trunc 40 }}
{{- else -}}
{{ randAlphaNum 40 }}
{{- end }}
{{- end }}

{{- /* "true" if several gateways share the sessions, behind routers. */ -}}
{{- define "fovea.isSharded" -}}
{{- if gt (int .Values.gateway.shards) 1 }}true{{ end }}
{{- end }}

{{- /* The components of this release, as JSON. */ -}}
{{- define "fovea.components" -}}
{{- $found := list "gateway" "renderer" "sampler" "trainer" -}}
{{- if include "fovea.isSharded" . }}{{ $found = append $found "router" }}{{ end -}}
{{ toJson $found }}
{{- end }}

{{- define "fovea.checks" -}}
{{- if and (include "fovea.isSharded" .) (not .Values.database.secret) }}
{{- fail (printf "gateway.shards: it is %d, and several gateways need PostgreSQL; set database.secret to a secret with its URL, or gateway.shards to 1" (int .Values.gateway.shards)) }}
{{- end }}
{{- if not (or .Values.database.secret (include "fovea.claim" (list . .Values.database.volume "database"))) }}
{{- fail "database: set database.secret, database.volume.claim or database.volume.size; without a database a restart loses all futures" }}
{{- end }}
{{- if not (or .Values.checkpoints.url (include "fovea.claim" (list . .Values.checkpoints.volume "checkpoints"))) }}
{{- fail "checkpoints: set checkpoints.url, checkpoints.volume.claim or checkpoints.volume.size; gateway and trainer share the checkpoints" }}
{{- end }}
{{- if and .Values.gateway.ingress.enabled (not .Values.gateway.ingress.host) }}
{{- fail "gateway.ingress.host: set the host name that clients use" }}
{{- end }}
{{- range $name := list "renderer" "sampler" }}
{{- with (index $.Values $name).autoscaling }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
{{- fail (printf "%s.autoscaling: minReplicas is %v, above maxReplicas, %v" $name .minReplicas .maxReplicas) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.gateway.grpcRoute.enabled (not .Values.gateway.grpcRoute.gateway) }}
{{- fail "gateway.grpcRoute.gateway: set the name of the Gateway that the route belongs to" }}
{{- end }}
{{- end }}
