{{/* Names: RELEASE-COMPONENT. The components' names are short, so that RELEASE may have 40 characters. */}}
{{- define "tandem.name" -}}
{{ printf "%s-%s" (trunc 40 .root.Release.Name | trimSuffix "-") .component }}
{{- end }}

{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "tandem.metadata" -}}
name: {{ include "tandem.name" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "tandem.labels" . | nindent 2 }}
{{- end }}

{{- define "tandem.image" -}}
{{- $tags := .root.Values.image.tags -}}
{{- $tag := $tags.cpu -}}
{{- if and (eq .root.Values.flavour "gpu") (has .component (list "rollout" "trainer")) -}}
{{- $tag = get $tags .component -}}
{{- end -}}
{{ .root.Values.image.repository }}:{{ $tag }}
{{- end }}

{{/* resources of the values, with the GPUs of the flavour */}}
{{- define "tandem.resources" -}}
{{- $values := get .root.Values .component -}}
{{- $resources := deepCopy $values.resources -}}
{{- if and (eq .root.Values.flavour "gpu") (has .component (list "rollout" "trainer")) -}}
{{- $resources = merge $resources (dict "limits" (dict "nvidia.com/gpu" $values.gpus)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{/* the volume of the run folders: is it mounted, and may it be written? */}}
{{- define "tandem.runs" -}}
{{- if has .component (list "trainer" "feed") -}}write
{{- else if or (has .component (list "controller" "dashboard")) (and (eq .component "rollout") .root.Values.runs.onSamplers) -}}read
{{- end -}}
{{- end }}

{{/* what a service of the run is started with, behind the recipe */}}
{{- define "tandem.overrides" -}}
{{- $values := .root.Values -}}
- run.run_id={{ $values.runId }}
- run.folder=/runs/{{ $values.runId }}
- run.host=auto
{{- if $values.tls.enabled }}
- run.certificates=/etc/tandem/certificates
- run.server_name={{ $values.tls.serverName }}
{{- else }}
- run.insecure=true
{{- end }}
- reward.port={{ $values.reward.port }}
- trainer.num_nodes={{ $values.trainer.nodes }}
{{- range $values.overrides }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "tandem.container" -}}
- name: {{ .component }}
  image: {{ include "tandem.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args:
    {{- toYaml .args | nindent 4 }}
    {{- if ne .component "dashboard" }}
    {{- include "tandem.overrides" . | nindent 4 }}
    {{- end }}
  workingDir: {{ ternary "/files" "/tmp" (ne .root.Values.files.existingClaim "") }}
  env:
    - {name: HOME, value: /tmp}
    - {name: TANDEM_REDIS_URL_FILE, value: /etc/tandem/redis/url}
    - {name: TANDEM_ADDRESS_FILE, value: /tmp/address}
    {{- if .root.Values.metrics.port }}
    - {name: TANDEM_METRICS_PORT, value: {{ .root.Values.metrics.port | quote }}}
    {{- end }}
    {{- if .root.Values.tls.enabled }}
    - {name: TANDEM_CERTIFICATES, value: /etc/tandem/certificates}
    {{- end }}
    {{- with .environment }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .ports }}
  ports:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .probes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  resources:
    {{- include "tandem.resources" . | nindent 4 }}
  securityContext:
    {{- include "tandem.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: shm, mountPath: /dev/shm}
    - {name: recipe, mountPath: /etc/tandem/recipe, readOnly: true}
    - {name: redis, mountPath: /etc/tandem/redis, readOnly: true}
    {{- if .root.Values.tls.enabled }}
    - {name: certificates, mountPath: /etc/tandem/certificates, readOnly: true}
    {{- end }}
    {{- if .root.Values.files.existingClaim }}
    - {name: files, mountPath: /files, readOnly: true}
    {{- end }}
    {{- with include "tandem.runs" . }}
    - {name: runs, mountPath: /runs, readOnly: {{ eq . "read" }}}
    {{- end }}
{{- end }}

{{/* a pod of Tandem: see the callers for its keys */}}
{{- define "tandem.pod" -}}
metadata:
  labels:
    {{- include "tandem.labels" . | nindent 4 }}
  annotations:
    checksum/recipe: {{ .root.Values.recipe | sha256sum }}
    {{- with .root.Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "tandem.podSecurity" . | nindent 2 }}
  {{- with .serviceAccountName }}
  serviceAccountName: {{ . }}
  {{- end }}
  automountServiceAccountToken: {{ hasKey . "serviceAccountName" }}
  enableServiceLinks: false
  {{- with .hostname }}
  hostname: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ ternary 75 60 (eq .component "environments") }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and (include "tandem.runs" .) (ne .component "trainer") (eq .root.Values.runs.accessMode "ReadWriteOnce") }}
  affinity:  # such a volume can be mounted on one node: the trainer's
    podAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "tandem.selector" (dict "root" .root "component" "trainer") | nindent 14 }}
  {{- else if .spread }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "tandem.selector" . | nindent 10 }}
  {{- end }}
  {{- with .root.Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .root.Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    {{- include "tandem.container" . | nindent 4 }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: shm, emptyDir: {medium: Memory}}
    - {name: recipe, configMap: {name: {{ include "tandem.name" (dict "root" .root "component" "recipe") }}}}
    - name: redis
      secret: {secretName: {{ .root.Values.redis.secretName }}, defaultMode: 0400, items: [{key: url, path: url}]}
    {{- if .root.Values.tls.enabled }}
    - {name: certificates, secret: {secretName: {{ .root.Values.tls.secretName }}, defaultMode: 0400}}
    {{- end }}
    {{- if .root.Values.files.existingClaim }}
    - {name: files, persistentVolumeClaim: {claimName: {{ .root.Values.files.existingClaim }}, readOnly: true}}
    {{- end }}
    {{- if include "tandem.runs" . }}
    - {name: runs, persistentVolumeClaim: {claimName: {{ include "tandem.claim" . }}}}
    {{- end }}
{{- end }}

{{/* root:1000 0440 is what a Secret's files are with fsGroup; the services accept such keys */}}
{{- define "tandem.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "tandem.claim" -}}
{{ .root.Values.runs.existingClaim | default (include "tandem.name" (dict "root" .root "component" "runs")) }}
{{- end }}

{{/* Kubernetes' own gRPC probes speak no TLS and need a fixed port: the command asks the address that it finds. */}}
{{- define "tandem.probes" -}}
{{- $command := list "tandem" "health" -}}
{{- if .root.Values.tls.enabled -}}
{{- $command = concat $command (list "--server-name" .root.Values.tls.serverName) -}}
{{- end -}}
startupProbe:
  exec: {command: {{ toJson $command }}}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: {{ .startMinutes | mul 6 }}
livenessProbe:
  exec: {command: {{ toJson $command }}}
  periodSeconds: 30
  timeoutSeconds: 15
  failureThreshold: 4
readinessProbe:
  exec: {command: {{ toJson $command }}}
  periodSeconds: 15
  timeoutSeconds: 10
{{- end }}

{{- define "tandem.ports" -}}
{{- if .root.Values.metrics.port }}
- {name: metrics, containerPort: {{ .root.Values.metrics.port }}}
{{- end }}
{{- end }}
