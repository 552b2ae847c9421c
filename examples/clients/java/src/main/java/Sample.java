import static java.util.concurrent.TimeUnit.MILLISECONDS;

import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.rpc.ErrorInfo;
import com.google.rpc.Status;
import fovea.api.v1.Gateway;
import fovea.api.v1.GatewayServiceGrpc;
import fovea.api.v1.GatewayServiceGrpc.GatewayServiceBlockingStub;
import fovea.api.v1.ModelInputOuterClass.Chunk;
import fovea.api.v1.ModelInputOuterClass.ImageChunk;
import fovea.api.v1.ModelInputOuterClass.ImageFormat;
import fovea.api.v1.ModelInputOuterClass.ModelInput;
import fovea.api.v1.ModelInputOuterClass.TokenChunk;
import fovea.api.v1.Sampler.FinishReason;
import fovea.api.v1.Sampler.SamplingParams;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.Callable;
import picocli.CommandLine;
import picocli.CommandLine.Command;
import picocli.CommandLine.Option;
import picocli.CommandLine.Parameters;

@Command(name = "sample", sortOptions = false, showDefaultValues = true,
    description = "Samples an answer to a picture from Fovea over gRPC and prints each token as it is made.")
public final class Sample implements Callable<Integer> {
  @Parameters(index = "0", paramLabel = "IMAGE") Path image;
  @Parameters(index = "1", paramLabel = "TOKENS_BEFORE") String before;
  @Parameters(index = "2", paramLabel = "TOKENS_AFTER") String after;
  @Option(names = "--address", defaultValue = "127.0.0.1:8001", description = "gateway's gRPC server") String address;
  @Option(names = "--api-key", defaultValue = "${env:TINKER_API_KEY:-}",
      description = "as the gateway knows it") String apiKey;
  @Option(names = "--ca", description = "use TLS and trust the authorities of this PEM file") File ca;
  @Option(names = "--model", description = "base model; default: the one that is served") String model;
  @Option(names = "--max-tokens", defaultValue = "16", description = "the most new tokens") int maxTokens;
  @Option(names = "--temperature", defaultValue = "1", description = "0 takes the most likely token") float temperature;
  @Option(names = "--seed", defaultValue = "0", description = "makes draws repeatable") long seed;
  @Option(names = "--timeout", defaultValue = "60", description = "deadline of everything, in seconds") double timeout;

  public static void main(String[] arguments) {
    System.exit(new CommandLine(new Sample()).setExecutionExceptionHandler((error, line, parsed) -> {
      System.err.println(error.getMessage());
      Status status = StatusProto.fromThrowable(error);
      for (Any detail : status == null ? List.<Any>of() : status.getDetailsList())
        if (detail.is(ErrorInfo.class)) describe(detail.unpack(ErrorInfo.class));
      return 1;
    }).execute(arguments));
  }

  @Override
  public Integer call() throws IOException {
    ChannelCredentials security = ca == null ? InsecureChannelCredentials.create()
        : TlsChannelCredentials.newBuilder().trustManager(ca).build();
    ManagedChannel channel = Grpc.newChannelBuilder(address, security).build();
    Metadata metadata = new Metadata();
    metadata.put(Metadata.Key.of("x-api-key", Metadata.ASCII_STRING_MARSHALLER), apiKey);
    GatewayServiceBlockingStub fovea = GatewayServiceGrpc.newBlockingStub(channel)
        .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(metadata))
        .withDeadlineAfter((long) (1000 * timeout), MILLISECONDS);
    try {
      ModelInput prompt = readPrompt();
      String session = fovea.createSession(Gateway.CreateSessionRequest.getDefaultInstance()).getSessionId();
      try {
        sample(fovea, session, prompt);
      } finally {
        fovea.finishSession(Gateway.FinishSessionRequest.newBuilder().setSessionId(session).build());
      }
      return 0;
    } finally {
      channel.shutdownNow();
    }
  }

  private void sample(GatewayServiceBlockingStub fovea, String session, ModelInput prompt) {
    if (model == null)
      model = fovea.getCapabilities(Gateway.GetCapabilitiesRequest.getDefaultInstance()).getModels(0).getName();
    var opened = fovea.createSamplingSession(
        Gateway.CreateSamplingSessionRequest.newBuilder().setSessionId(session).setBaseModel(model).build());
    var params = SamplingParams.newBuilder().setMaxTokens(maxTokens).setTemperature(temperature).setSeed(seed);
    var request = Gateway.SampleTokensRequest.newBuilder().setSamplingSessionId(opened.getSamplingSessionId())
        .setPrompt(prompt).setSampleCount(1).setParams(params).build();
    int total = 0;
    var events = fovea.sampleTokens(request);
    while (events.hasNext()) {
      var delta = events.next().getDelta();
      ByteBuffer tokens = littleEndian(delta.getTokens()), logprobs = littleEndian(delta.getLogprobs());
      for (; tokens.hasRemaining(); total++)
        System.out.printf(Locale.ROOT, "%d %.6f%n", tokens.getInt(), logprobs.getFloat());
      if (delta.getFinishReason() != FinishReason.FINISH_REASON_UNSPECIFIED)
        System.out.println(total + " tokens, " + delta.getFinishReason());
    }
  }

  private ModelInput readPrompt() throws IOException {
    boolean png = image.toString().toLowerCase(Locale.ROOT).endsWith(".png");
    var picture = ImageChunk.newBuilder().setData(ByteString.copyFrom(Files.readAllBytes(image)))
        .setFormat(png ? ImageFormat.IMAGE_FORMAT_PNG : ImageFormat.IMAGE_FORMAT_JPEG);
    return ModelInput.newBuilder().addChunks(tokenChunk(before)).addChunks(Chunk.newBuilder().setImage(picture))
        .addChunks(tokenChunk(after)).build();
  }

  /** Packs token ids, separated by spaces, as little-endian int32. */
  private static Chunk tokenChunk(String ids) {
    String[] words = ids.strip().split("\\s+");
    ByteBuffer packed = ByteBuffer.allocate(4 * words.length).order(ByteOrder.LITTLE_ENDIAN);
    for (String word : words) packed.putInt(Integer.parseInt(word));
    return Chunk.newBuilder().setTokens(TokenChunk.newBuilder().setTokens(ByteString.copyFrom(packed.flip()))).build();
  }

  private static ByteBuffer littleEndian(ByteString bytes) {
    return bytes.asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN);
  }

  private static void describe(ErrorInfo info) {
    System.err.printf("reason: %s, field: %s%n", info.getReason(), info.getMetadataOrDefault("field", ""));
  }
}
