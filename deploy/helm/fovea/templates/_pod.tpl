{{/* A pod of any service: (dict "root" $ "component" "sampler"), with "labels" of its own if it has some. The service's own
file defines `fovea.<component>.env`, `.ports` and `.probes`. */}}
{{- define "fovea.pod" -}}
{{- $root := .root -}}
{{- $values := index .root.Values .component -}}
{{- $hasModel := not (has .component (list "gateway" "router")) -}}
{{- $hasGpu := has .component (list "sampler" "trainer") -}}
{{- $gpus := ternary $values.gpus 0 $hasGpu | int -}}
{{- /* Seconds until no new requests are routed here; in a rolling update of the gateway, until the next one has started. */ -}}
{{- $lead := ternary 15 5 (and (eq .component "gateway") (ne $root.Values.database.secret "") (not (include "fovea.isSharded" $root))) -}}
metadata:
  labels:
    {{- include "fovea.selector" (list $root .component) | nindent 4 }}
    {{- with .labels }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- with $values.labels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with $values.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "fovea.fullname" $root }}-{{ .component }}
  automountServiceAccountToken: {{ eq .component "gateway" }}
  # Otherwise a service named fovea-sampler would set FOVEA_SAMPLER_PORT=tcp://..., which is the name of a setting.
  enableServiceLinks: false
  # The gateway drains twice: first commands, then calls.
  terminationGracePeriodSeconds: {{ add $lead 20 (mul 2 $values.drainSeconds) }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- range $name := list "priorityClassName" "runtimeClassName" "schedulerName" }}
  {{- with index $values $name }}
  {{ $name }}: {{ . }}
  {{- end }}
  {{- end }}
  {{- range $name := list "nodeSelector" "tolerations" "affinity" }}
  {{- with index $values $name }}
  {{ $name }}: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with and (or (ne .component "gateway") (include "fovea.isSharded" $root)) $values.topologySpread }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector: {matchLabels: {{ include "fovea.selector" (list $root $.component) | fromYaml | toJson }}}
  {{- end }}
  {{- if and $gpus $root.Values.gpuDeviceClass }}
  resourceClaims:
    - {name: gpus, resourceClaimTemplateName: {{ include "fovea.fullname" $root }}-{{ .component }}-gpus}
  {{- end }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ $root.Values.image.repository }}/{{ ternary "gateway" .component (eq .component "router") }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- if eq .component "router" }}
      command: [python, -m, fovea_gateway.fronts.router]
      {{- end }}
      env: {{- include "fovea.env" . | nindent 8 }}
      {{- $secrets := compact (list (ternary $root.Values.checkpoints.secret "" (has .component (list "gateway" "trainer"))) ($values.envSecret | default "")) }}
      {{- with $secrets }}
      envFrom:
        {{- range . }}
        - secretRef: {name: {{ . }}}
        {{- end }}
      {{- end }}
      ports:
        {{- include (printf "fovea.%s.ports" .component) $root | nindent 8 }}
        - {name: metrics, containerPort: 9090}
        {{- if and $root.Values.tls.enabled $hasModel }}
        - {name: health, containerPort: 9091}
        {{- end }}
      {{- include (printf "fovea.%s.probes" .component) $root | nindent 6 }}
      {{- if ne .component "trainer" }}
      lifecycle:
        preStop: {sleep: {seconds: {{ $lead }}}}
      {{- end }}
      {{- $resources := deepCopy $values.resources }}
      {{- if and $gpus $root.Values.gpuDeviceClass }}
      {{- $_ := set $resources "claims" (list (dict "name" "gpus")) }}
      {{- else if $gpus }}
      {{- $_ := set $resources "limits" (merge (dict $root.Values.gpuResource $gpus) ($resources.limits | default dict)) }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          {{- if and $hasGpu $root.Values.ipcLock }}
          add: [IPC_LOCK]
          {{- end }}
      volumeMounts:
        - {name: scratch, mountPath: /tmp}
        {{- if and $root.Values.tls.enabled (ne .component "router") }}
        - {name: tls, mountPath: /tls, readOnly: true}
        {{- end }}
        {{- if $hasGpu }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- range $name, $path := include "fovea.volumes" . | fromYaml }}
        - {name: {{ $name }}, mountPath: {{ $path }}, readOnly: {{ or (index $root.Values $name).volume.readOnly (and (eq $name "model") (not $hasModel)) }}}
        {{- end }}
  volumes:
    - {name: scratch, emptyDir: {}}
    {{- if and $root.Values.tls.enabled (ne .component "router") }}
    - {name: tls, secret: {secretName: {{ include "fovea.tlsSecret" $root }}, defaultMode: 0440}}
    {{- end }}
    {{- if $hasGpu }}
    - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}}
    {{- end }}
    {{- range $name, $path := include "fovea.volumes" . | fromYaml }}
    - name: {{ $name }}
      {{- with and (not (and (eq $name "database") $root.Values.database.secret)) (include "fovea.claim" (list $root (index $root.Values $name).volume $name)) }}
      persistentVolumeClaim: {claimName: {{ . }}}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- end }}
{{- end }}

{{- /* Mount paths of volumes, by the name of their values. */ -}}
{{- define "fovea.volumes" -}}
{{- if eq .component "gateway" }}
database: /var/lib/fovea
{{- end }}
{{- if or (has .component (list "renderer" "sampler" "trainer")) (and (eq .component "gateway") (include "fovea.claim" (list .root .root.Values.model.volume "model"))) }}
model: /models
{{- end }}
{{- if and (has .component (list "gateway" "trainer")) (not .root.Values.checkpoints.url) }}
checkpoints: /checkpoints
{{- end }}
{{- end }}

{{- define "fovea.env" -}}
{{- $root := .root -}}
{{- $values := index .root.Values .component -}}
{{- $isRouter := eq .component "router" -}}
{{- /* A router reads the gateway's variables. */ -}}
{{- $prefix := printf "FOVEA_%s" (upper (ternary "gateway" .component $isRouter)) -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: {{ $prefix }}_HOST, value: "0.0.0.0"}
- {name: {{ $prefix }}_METRICS_PORT, value: "9090"}
- {name: {{ $prefix }}_LOG_LEVEL, value: {{ $root.Values.logLevel }}}
- {name: {{ $prefix }}_DRAIN_S, value: {{ $values.drainSeconds | quote }}}
{{- if not $isRouter }}
- {name: {{ $prefix }}_MODEL, value: {{ $root.Values.model.source | quote }}}
- name: FOVEA_SERVICE_SECRET
  valueFrom: {secretKeyRef: {name: {{ $root.Values.serviceSecret.secret | default (printf "%s-service-secret" (include "fovea.fullname" $root)) }}, key: service-secret}}
{{- end }}
{{- if and $root.Values.tls.enabled (not $isRouter) }}
- {name: FOVEA_TLS_DIR, value: /tls}
{{- if ne .component "gateway" }}
- {name: {{ $prefix }}_HEALTH_PORT, value: "9091"}
{{- end }}
{{- end }}
{{- with $root.Values.traceEndpoint }}
- {name: FOVEA_TRACE_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- if and (has .component (list "renderer" "sampler" "trainer")) $root.Values.model.token.secret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ $root.Values.model.token.secret }}, key: {{ $root.Values.model.token.key }}}}
{{- end }}
{{ include (printf "fovea.%s.env" .component) $root }}
{{- range $name, $value := $isRouter | ternary (pick $root.Values.gateway.settings "max_body_bytes" "max_connections" "request_timeout_s") $values.settings }}
- {name: {{ $prefix }}_{{ upper $name }}, value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}}
{{- end }}
{{- range $name, $value := $values.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "fovea.tlsSecret" -}}
{{ .Values.tls.secret | default (printf "%s-tls" (include "fovea.fullname" .)) }}
{{- end }}

{{- /* The port of health checks for a kubelet, which has no certificate: (list $ port-without-tls). */ -}}
{{- define "fovea.healthPort" -}}
{{ ternary 9091 (index . 1) (index . 0).Values.tls.enabled }}
{{- end }}

{{- /* Probes with gRPC health checks: (list port seconds-to-start). NOT_SERVING until the model is loaded. */ -}}
{{- define "fovea.grpcProbes" -}}
startupProbe:
  grpc: {port: {{ index . 0 }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ div (add (index . 1) 9) 10 }}
readinessProbe:
  grpc: {port: {{ index . 0 }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 3
livenessProbe:
  grpc: {port: {{ index . 0 }}}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}

{{- /* The label of pods that wait for their quota one by one. Kueue allows no change of a stateful set with this label. */ -}}
{{- define "fovea.queue" -}}
{{- with .Values.kueue.queue }}
kueue.x-k8s.io/queue-name: {{ . }}
{{- end }}
{{- end }}

{{- /* The GPUs that each pod of a component claims by dynamic resource allocation: (list $ component). */ -}}
{{- define "fovea.claimTemplate" -}}
{{- $root := index . 0 -}}
{{- $gpus := (index $root.Values (index . 1)).gpus | int -}}
{{- if and $gpus $root.Values.gpuDeviceClass }}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {{- include "fovea.meta" (list $root (index . 1) (printf "%s-gpus" (index . 1))) | nindent 2 }}
spec:
  spec:
    devices:
      requests:
        - {name: gpus, exactly: {deviceClassName: {{ $root.Values.gpuDeviceClass }}, count: {{ $gpus }}}}
{{- end }}
{{- end }}
