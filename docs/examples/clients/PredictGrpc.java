// A client in Java over gRPC. How to build and run it: docs/howto/clients.md.
import com.google.protobuf.ByteString;
import inference.GRPCInferenceServiceGrpc;
import inference.Inference.InferTensorContents;
import inference.Inference.ModelInferRequest;
import io.grpc.ManagedChannelBuilder;
import java.util.concurrent.TimeUnit;

public class PredictGrpc {
    static ModelInferRequest.InferInputTensor texts(String name, String... values) {
        var column = InferTensorContents.newBuilder();
        for (String value : values) {
            column.addBytesContents(ByteString.copyFromUtf8(value));
        }
        return ModelInferRequest.InferInputTensor.newBuilder()
            .setName(name).setDatatype("BYTES").addShape(values.length).setContents(column).build();
    }

    static ModelInferRequest.InferInputTensor numbers(String name, float... values) {
        var column = InferTensorContents.newBuilder();
        for (float value : values) {
            column.addFp32Contents(value);
        }
        return ModelInferRequest.InferInputTensor.newBuilder()
            .setName(name).setDatatype("FP32").addShape(values.length).setContents(column).build();
    }

    public static void main(String[] arguments) {
        var channel = ManagedChannelBuilder.forTarget("localhost:8500").usePlaintext().build();
        var answer = GRPCInferenceServiceGrpc.newBlockingStub(channel).withDeadlineAfter(5, TimeUnit.SECONDS).modelInfer(
            ModelInferRequest.newBuilder().setModelName("shop")
                .addInputs(texts("city", "Oslo", "Oslo")).addInputs(texts("device", "phone", "phone"))
                .addInputs(texts("item", "item-11", "item-12")).addInputs(numbers("price", 18.04f, 9f))
                .addOutputs(ModelInferRequest.InferRequestedOutputTensor.newBuilder().setName("logistic"))
                .build());
        System.out.println("version " + answer.getModelVersion() + " says "
            + answer.getOutputs(0).getContents().getFp32ContentsList());
        channel.shutdown();
    }
}
